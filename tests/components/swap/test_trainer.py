"""The Trainer of transformers does not notice that a model is swapped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.swap import unswap
from tests.components.swap.levels import LEVELS, bytes_of, pair

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": REENTRANT,
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 99, (count, 12), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": one, "labels": one.clone()} for one in ids]


def trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    fixed = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "seed": 1, "logging_steps": 1, "max_steps": 4}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **{**fixed, **quiet, **options})
    return transformers.Trainer(model, arguments, train_dataset=texts(16), eval_dataset=texts(4))


def curve(model: nn.Module, folder: Path, **options: Any) -> torch.Tensor:
    """The losses of all steps, then the norms of the gradients, then the loss of the evaluation."""
    run = trainer(model, folder, **options)
    run.train()
    steps = [one for one in run.state.log_history if "loss" in one]
    assert len(steps) == 4
    return torch.tensor([one[key] for key in ("loss", "grad_norm") for one in steps] + [run.evaluate()["eval_loss"]])


@pytest.mark.parametrize(
    ("name", "level", "option"),
    [
        pytest.param(
            *(name, level, option),
            marks=() if (name, level, option) == ("gpt2", "layers", "checkpointing") else pytest.mark.slow,
        )
        for name in ("gpt2", "bert")
        for level in LEVELS
        for option in OPTIONS
    ],
)
def test_it_trains_as_the_plain_model(name: str, level: str, option: str, tmp_path: Path) -> None:
    plain, swapped = pair(name, level)
    wanted, got = (curve(model, tmp_path, **OPTIONS[option]) for model in (plain, swapped))
    half = "bf16" in option
    torch.testing.assert_close(got, wanted, atol=0.0, rtol=1e-2 if half else 1e-5)
    for one, other in zip(swapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=8e-3 if half else 2e-5, rtol=0.0)
    before = bytes_of(swapped)
    assert unswap(swapped) > 0
    assert bytes_of(swapped) == before


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_plain_model(tmp_path: Path) -> None:
    plain, swapped = pair("gpt2", "layers")
    options = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    wanted = curve(plain, tmp_path / "plain", **options)
    curve(swapped, tmp_path / "swapped", **options)
    again, _ = pair("gpt2", "layers")
    run = trainer(again, tmp_path / "again", **options)
    run.train(resume_from_checkpoint=str(tmp_path / "swapped" / "checkpoint-2"))
    losses = [one["loss"] for one in run.state.log_history if "loss" in one]
    torch.testing.assert_close(torch.tensor(losses), wanted[:4], atol=0.0, rtol=1e-4)
