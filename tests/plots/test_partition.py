import json
from pathlib import Path

import matplotlib.image
import pytest

from plots.partition import draw, main

SAVED = {"layer": "GPT", "dtype": "float32", "eager": 18.0, "torch.compile": 16.5, "fuse": 10.0}
BUDGET = [
    {"torch units": 9.0, "torch FLOPs %": 0.0, "fuse units": 8.9, "fuse FLOPs %": 0.0},
    {"torch units": 2.0, "torch FLOPs %": 60.0, "fuse units": 2.0, "fuse FLOPs %": 55.0},
]


def written(folder: Path, sections: dict[str, object]) -> Path:
    path = folder / "partition.json"
    path.write_text(json.dumps({"machine": "a machine", "date": "2026-11-21", "sections": sections}))
    return path


def test_draws_a_picture_for_each_section_that_has_one(tmp_path: Path) -> None:
    path = written(tmp_path, {"saved": [SAVED], "budget": BUDGET, "speed": [{"layers": 12}]})
    pictures = draw(path)
    assert [picture.name for picture in pictures] == ["partition_saved.png", "partition_budget.png"]
    for picture in pictures:
        pixels = matplotlib.image.imread(picture)[..., :3]
        ours = (abs(pixels - [0xD1 / 255, 0x49 / 255, 0x5B / 255]) < 0.25).all(-1)
        assert ours.sum() > 50


def test_a_budget_that_fuse_cannot_keep_has_no_point(tmp_path: Path) -> None:
    def red(rows: list[dict[str, object]]) -> int:
        (picture,) = draw(written(tmp_path, {"budget": rows}))
        pixels = matplotlib.image.imread(picture)[..., :3]
        return int((abs(pixels - [0xD1 / 255, 0x49 / 255, 0x5B / 255]) < 0.25).all(-1).sum())

    assert red([BUDGET[0], {**BUDGET[1], "fuse units": "-", "fuse FLOPs %": "-"}]) < red(BUDGET) / 2


def test_bad_files_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"subject": "an op"}')
    assert main([str(other)]) == 2
    assert "was not written by `python -m benchmarks.partition --json`" in capsys.readouterr().err
    assert main([str(written(tmp_path, {"speed": []}))]) == 2
    assert "has no section saved or budget; measure with --only saved,budget" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json")]) == 2
    assert main([]) == 2
    assert "usage: python plots/partition.py" in capsys.readouterr().err
