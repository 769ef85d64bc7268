import io
import sys
from pathlib import Path

import matplotlib
import matplotlib.image
import pytest
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.metrics import Metrics
from fuselayers.cli.train.plot import plot_loss


def _rows(losses: list[float], *, validation: bool) -> list[Metrics]:
    return [
        Metrics(step, loss, loss if validation and step % 5 == 0 else None, 1e-3, 1.0, 1.0, 1.0, None, 10**9)
        for step, loss in enumerate(losses, start=1)
    ]


def test_the_picture_shows_the_curve(tmp_path: Path) -> None:
    backend = matplotlib.get_backend(auto_select=False)
    plot_loss(tmp_path / "a.png", _rows([5.0 - step / 10 for step in range(30)], validation=True), title="a run")
    plot_loss(tmp_path / "b.png", _rows([5.0 - step / 10 for step in range(30)], validation=False), title="a run")
    picture, without_validation = (matplotlib.image.imread(tmp_path / name) for name in ("a.png", "b.png"))
    orange = (abs(picture[..., :3] - (1.0, 0.498, 0.055)).max(-1) < 0.02).sum()
    assert orange > 100
    assert (abs(without_validation[..., :3] - (1.0, 0.498, 0.055)).max(-1) < 0.02).sum() == 0
    assert matplotlib.get_backend(auto_select=False) == backend


def test_one_row_and_no_row_can_be_drawn(tmp_path: Path) -> None:
    for rows in (_rows([5.0], validation=False), []):
        plot_loss(tmp_path / "loss.png", rows, title="short")
        assert matplotlib.image.imread(tmp_path / "loss.png").shape[:2] == (450, 800)


def test_a_run_without_matplotlib_ends_without_its_picture(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    overrides = [*tiny, f"train.output={tmp_path / 'run'}", "train.steps=2"]
    assert train(overrides, console=Console(file=io.StringIO())) == 0
    said = "no loss.png: a picture needs matplotlib; install it with: pip install 'fuselayers[plots]'"
    assert said in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.csv").exists()
    assert not (tmp_path / "run" / "loss.png").exists()
