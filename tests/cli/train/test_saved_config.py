"""The config.yaml beside a run: complete, without references, and the same model again."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.checkpoint import read_checkpoint
from fuselayers.configs import build, choices, compose, to_yaml

TINY = [
    "model.hidden_dim=16",
    "model.num_layers=2",
    "model.context_length=8",
    "attention.num_heads=4",
    "fusion=off",
    "model.layers=[{at: -1, feedforward: {name: mlp, activation: relu}}]",
]
TRAINING = [
    "train=quick",
    "train.steps=2",
    "train.warmup_steps=1",
    "train.sample_bytes=0",
    "train.device=cpu",
    "data=text",
]


def _forward(model: torch.nn.Module, vocab_size: int) -> torch.Tensor:
    tokens_BT = torch.randint(vocab_size, (2, 8), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(tokens_BT)


def _check_same_model(saved: Path, model: torch.nn.Module, vocab_size: int) -> None:
    assert "$" not in saved.read_text()
    again = build(saved)
    state = model.state_dict()
    assert {name: value.shape for name, value in again.state_dict().items()} == {
        name: value.shape for name, value in state.items()
    }
    again.load_state_dict(state)
    assert torch.equal(_forward(again, vocab_size), _forward(model, vocab_size))


@pytest.mark.parametrize("model", [name for name in choices("model") if compose(name).model.name == "decoder"])
def test_a_runs_config_builds_the_model_of_its_checkpoint(model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 300)
    asked = [f"model={model}", *TINY, *TRAINING, f"data.path={text}", f"train.output={tmp_path / 'run'}"]
    assert train(asked, console=Console(file=io.StringIO())) == 0
    config = compose(overrides=asked)
    trained = build(config)
    trained.load_state_dict(read_checkpoint(tmp_path / "run" / "checkpoint.pt").model)
    _check_same_model(tmp_path / "run" / "config.yaml", trained, int(config.model.options["vocab_size"]))
    assert compose(tmp_path / "run" / "config.yaml", [f"train.output={tmp_path / 'run'}"]) == config


@pytest.mark.parametrize("model", choices("model"))
def test_a_written_config_builds_the_same_model(model: str, tmp_path: Path) -> None:
    config = compose(model, TINY)
    torch.manual_seed(0)
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(config))
    _check_same_model(saved, build(config), int(config.model.options["vocab_size"]))
