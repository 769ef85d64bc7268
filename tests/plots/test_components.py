import re
from pathlib import Path

import pytest

from fuselayers.components import KINDS, get, names
from plots import walks
from plots.components import FOLDER, PICTURES, draw

# Members that no picture names: `none`, which does nothing, and the attentions. One attention is drawn by its parts.
_NOT_DRAWN = {"none", *names("attention")}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {path.stem: path for path in draw(tmp_path_factory.mktemp("pictures"), PICTURES)}


def _words(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))


def test_there_is_a_picture_of_every_kind() -> None:
    assert set(PICTURES) == set(KINDS)
    assert {path.stem for path in FOLDER.glob("*.svg")} == {*PICTURES, *walks.PICTURES, "architecture"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_is_in_the_picture(kind: str, drawn: dict[str, Path]) -> None:
    text = " ".join(_words(drawn[kind])).replace(" _", "_")
    # Components that other tests register do not count.
    ours = [name for name in names(kind) if get(kind, name).__module__.startswith("fuselayers.")]
    assert [name for name in ours if name not in _NOT_DRAWN and re.search(rf"\b{name}\b", text) is None] == []


@pytest.mark.parametrize("kind", PICTURES)
def test_what_is_checked_in_is_what_the_script_draws(kind: str, drawn: dict[str, Path]) -> None:
    # Compare the words: another version of matplotlib writes other bytes.
    checked_in = FOLDER / f"{kind}.svg"
    assert _words(checked_in) == _words(drawn[kind])
    assert checked_in.stat().st_size < 100_000
