import json
import re
import shutil
from pathlib import Path

import pytest

from plots.fine_tune_gpt2 import draw

ROOT = Path(__file__).parents[2]
FOLDERS = [file.parent for file in (ROOT / "plots" / "cpu").glob("*/fine_tune_gpt2.json")]


def words(picture: Path) -> list[str]:
    return re.findall(r"<!-- (.*?) -->", picture.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.name))
def test_the_picture_is_drawn_from_the_data_beside_it(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "fine_tune_gpt2.json", tmp_path)
    picture = draw(tmp_path)
    # Compare the words: another version of matplotlib writes other bytes.
    assert words(picture) == words(folder / "fine_tune_gpt2.svg")
    content = json.loads((folder / "fine_tune_gpt2.json").read_text())
    for saved_bytes in content["saved_bytes"].values():
        assert {f"{value / 1e3:,.0f}" for value in saved_bytes.values()} <= set(words(picture))


def test_the_losses_are_those_of_the_plain_model() -> None:
    assert FOLDERS
    for folder in FOLDERS:
        losses = json.loads((folder / "fine_tune_gpt2.json").read_text())["losses"]
        # Kernels and compiled code add in another order, and the steps of AdamW amplify the difference.
        for level in ("layers", "blocks"):
            assert losses[level] == pytest.approx(losses["plain"], rel=1e-3)
