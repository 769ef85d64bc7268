"""The config.yaml beside a run: complete, without references, and the same model again."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.checkpoint import read_checkpoint, save, whole_tensors
from fuselayers.configs import build, compose

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


def _forward(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(example.shape, generator=generator)
        if example.is_floating_point()
        else torch.randint(10, example.shape, generator=generator)
        for example in model.example_inputs(batch_size=2, device="cpu")
    ]
    with torch.no_grad():
        return model.eval()(*inputs)


def _check_same_model(saved: Path, model: torch.nn.Module) -> None:
    assert "$" not in saved.read_text()
    again = build(saved)
    state = model.state_dict()
    assert {name: value.shape for name, value in again.state_dict().items()} == {
        name: value.shape for name, value in state.items()
    }
    again.load_state_dict(state)
    assert torch.equal(_forward(again), _forward(model))


@pytest.mark.parametrize(
    "model",
    [
        "gpt_nano",
        "mixtral_tiny",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama_tiny", "gemma2_tiny", "phi_tiny")),
    ],
)
def test_a_runs_config_builds_the_model_of_its_checkpoint(model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 300)
    asked = [f"model={model}", *TINY, *TRAINING, f"data.path={text}", f"train.output={tmp_path / 'run'}"]
    assert train(asked, console=Console(file=io.StringIO())) == 0
    config = compose(overrides=asked)
    trained = build(config)
    path = tmp_path / "run" / "checkpoints" / "step-000002"
    trained.load_state_dict(whole_tensors(path, read_checkpoint(path), prefix="model."))
    _check_same_model(tmp_path / "run" / "config.yaml", trained)
    assert compose(tmp_path / "run" / "config.yaml", [f"train.output={tmp_path / 'run'}"]) == config


def test_a_run_with_files_of_ones_own_is_continued_without_them(tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "small.yaml").write_text(
        "# @package _global_\ndefaults: [llama_tiny, override /residual: parallel]\n"
        "model: {hidden_dim: 16, num_layers: 1, context_length: 8}\nattention: {num_heads: 4}\n"
    )
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 300)
    run = tmp_path / "run"
    asked = [f"hydra.searchpath=[{tmp_path / 'mine'}]", "model=small", "fusion=off", f"data.path={text}"]
    assert train([*asked, *TRAINING, f"train.output={run}"], console=Console(file=io.StringIO())) == 0
    written = (run / "config.yaml").read_text()
    assert "hydra" not in written
    assert "name: parallel" in written
    output = io.StringIO()
    assert train([f"train.resume={run}", "train.steps=3"], console=Console(file=output, width=200)) == 0
    assert "continuing after step 2" in output.getvalue()
    # the folder may stand there again
    assert train([asked[0], f"train.resume={run}", "train.steps=4"], console=Console(file=io.StringIO())) == 0


def test_a_checkpoint_with_a_config_that_does_not_compose_says_so(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 300)
    asked = [*TINY, *TRAINING, f"data.path={text}", f"train.output={tmp_path / 'run'}"]
    assert train(asked, console=Console(file=io.StringIO())) == 0
    path = tmp_path / "run" / "checkpoints" / "step-000002"
    checkpoint = read_checkpoint(path)
    edited = checkpoint.texts.config_yaml.replace("name: transformer", "name: transfomer")
    texts = replace(checkpoint.texts, config_yaml=edited)
    save(path.parent, whole_tensors(path, checkpoint), step=2, texts=texts)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        train([f"train.resume={path}"], console=Console(file=io.StringIO()))
    assert str(caught.value) == (
        f"the config in the checkpoint {path} does not compose: no block 'transfomer'; did you mean 'transformer'? "
        "there are: reversible, transformer"
    )
