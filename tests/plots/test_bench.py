import json
from pathlib import Path

import pytest

from plots.bench import draw, main

MEASURED = {
    "subject": "an op, 2 x 3",
    "machine": "a machine",
    "date": "2026-11-21",
    "seconds": {
        "plain": {"forward": [0.002, 0.003, 0.004], "forward_backward": [0.005, 0.006, 0.007]},
        "inductor": {"forward": [0.001, 0.001, 0.002], "forward_backward": [0.003, 0.003, 0.004]},
    },
}


def written(folder: Path, content: object) -> Path:
    path = folder / "op.json"
    path.write_text(json.dumps(content))
    return path


def test_draws_beside_the_data(tmp_path: Path) -> None:
    picture = draw(written(tmp_path, MEASURED))
    assert picture == tmp_path / "op.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    faster = json.loads(json.dumps(MEASURED))
    faster["seconds"]["inductor"]["forward"] = [0.0001, 0.0001, 0.0001]
    before = picture.read_bytes()
    assert draw(written(tmp_path, faster)).read_bytes() != before


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ValueError, match=r"was not written by `fuselayers bench --json`: it lacks subject, machine, date"
    ):
        draw(written(tmp_path, {"loss": 3}))
    once = json.loads(json.dumps(MEASURED))
    once["seconds"]["plain"]["forward"] = [0.002]
    with pytest.raises(ValueError, match=r"holds 1 times of plain; measure with --repeats 2 or more$"):
        draw(written(tmp_path, once))
    assert main([]) == 2
    assert main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_every_picture_has_its_data() -> None:
    plots = Path(__file__).parents[2] / "plots"
    for picture in plots.rglob("*.png"):
        # NAME.png, or one of several pictures of the same data: NAME_saved.png.
        names = {picture.stem, picture.stem.rpartition("_")[0]} - {""}
        assert any((picture.parent / f"{name}.{kind}").exists() for name in names for kind in ("json", "csv")), picture
