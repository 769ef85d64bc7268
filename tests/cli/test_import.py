"""`--import` lets the command line use a user's class."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.components import names
from fuselayers.components.registry import unregister
from tests.cli.train.conftest import before_step, run_train

MODULE = '''
from torch import nn

from fuselayers.components import register
from fuselayers.components.option import Positive, checked


@register("feedforward", "tripled")
class Tripled(nn.Module):
    """x times a number.

    Args:
        times: the number.
    """

    @checked
    def __init__(self, hidden_dim: int, *, times: Positive = 3.0) -> None:
        super().__init__()
        self.scale = nn.Linear(hidden_dim, hidden_dim)
        self.times = times

    def forward(self, x):
        return self.scale(x) * self.times
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_layers.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
def fresh(folder: Path, own_components: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return to a freshly started script: no user module imported, and the working directory not on the path."""

    def start() -> None:
        if "tripled" in names("feedforward"):
            unregister("feedforward", "tripled")
        monkeypatch.delitem(sys.modules, "my_layers", raising=False)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(folder))])

    monkeypatch.chdir(folder)
    return start


def test_list_shows_it_and_train_trains_and_continues(
    folder: Path, fresh: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fresh()
    assert main(["list", "feedforward", "--import", "my_layers"]) == 0
    assert "times float, above 0, default 3.0: the number." in " ".join(capsys.readouterr().out.split())
    fresh()
    assert main(["list", "feedforward"]) == 0
    assert "tripled" not in capsys.readouterr().out

    (folder / "text.txt").write_text("a line of text\n" * 300)
    sizes = ["model.hidden_dim=8", "attention.num_heads=2", "model.num_layers=1", "model.context_length=8"]
    run = ["train=quick", "train.sample_bytes=0", "train.output=run", "train.device=cpu", "fusion=off"]
    data = ["data=text", "data.path=text.txt"]
    assert main(["train", "--import", "my_layers", "feedforward=tripled", *sizes, *run, *data]) == 0
    assert "name: tripled" in (folder / "run" / "config.yaml").read_text()

    fresh()
    capsys.readouterr()
    assert main(["train", "train.resume=run", "train.steps=12"]) == 2
    assert (
        "the config in the checkpoint run/checkpoints/step-000010 does not compose: no feedforward 'tripled'"
        in capsys.readouterr().err
    )
    fresh()
    assert main(["train", "--import", "my_layers", "train.resume=run", "train.steps=12"]) == 0
    assert "continuing after step 10" in capsys.readouterr().out


def test_a_run_that_is_stopped_says_what_to_import_again(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_step(monkeypatch, 1, lambda trainer: signal.raise_signal(signal.SIGINT))
    asked = [*tiny, f"train.output={tmp_path / 'run'}"]
    printed = run_train(asked, code=128 + signal.SIGINT, imports=["one", "my.two"])
    assert f"fuselayers train --import one --import my.two train.resume={tmp_path / 'run'}" in printed


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("no_such_module", "--import no_such_module: there is no module 'no_such_module', neither in /"),
        (
            "./my_layers.py",
            "--import takes the name of a module, such as my_module or package.module, got './my_layers.py'",
        ),
    ],
)
def test_modules_that_cannot_be_imported(capsys: pytest.CaptureFixture[str], module: str, text: str) -> None:
    assert main(["list", "norm", "--import", module]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fuselayers: {text}")
    assert captured.out == ""


def test_a_config_cannot_import(capsys: pytest.CaptureFixture[str]) -> None:
    for override in ("import=my_layers", "imports=[my_layers]"):
        assert main(["train", override]) == 2
        assert "no config group 'import" in capsys.readouterr().err
