from pathlib import Path

from fuselayers.partition import cut, passes


def test_every_pass_has_its_place_in_the_order() -> None:
    code = Path(cut.__file__).read_text(encoding="utf-8")
    names = [name for name in vars(passes) if name.endswith("_pass")]
    assert len(names) > 15
    assert [name for name in names if f"{name}(" not in code] == []
