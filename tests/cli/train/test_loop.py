import copy
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.cli.train.data import read_text
from fuselayers.cli.train.loop import Trainer, reproducible
from fuselayers.configs import build, compose


def _trainer(overrides: list[str], text_file: Path) -> Trainer:
    config = compose(overrides=overrides)
    torch.manual_seed(0)
    return Trainer(
        build(config), read_text(str(text_file)), config=config.train, sequence_length=16, device=torch.device("cpu")
    )


def _only(tiny: list[str], *changed: str) -> list[str]:
    keys = {override.partition("=")[0] for override in changed}
    return [override for override in tiny if override.partition("=")[0] not in keys] + list(changed)


def test_accumulated_micro_batches_make_the_step_of_one_batch(tiny: list[str], text_file: Path) -> None:
    accumulated = _trainer(_only(tiny, "train.accumulate=2", "train.clip_norm=0"), text_file)
    update = accumulated.step(1)

    whole = _trainer(_only(tiny, "train.clip_norm=0"), text_file)
    parts = [accumulated.batch(1, micro_batch=number) for number in range(2)]
    tokens_BT, targets_BT = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    loss = whole.loss(tokens_BT, targets_BT)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([parameter.grad.norm() for parameter in whole.model.parameters() if parameter.grad is not None])
    for group in whole.optimizer.param_groups:
        group["lr"] = update.learning_rate
    whole.optimizer.step()

    assert update.tokens == 2 * 4 * 16
    assert update.loss == pytest.approx(loss.item(), abs=1e-6)
    assert update.gradient_norm == pytest.approx(norm.norm().item(), rel=1e-5)
    # Adam's first step is the sign of the gradient: where that is all rounding error, the sign may differ.
    for name, tensor in whole.model.state_dict().items():
        assert (tensor - accumulated.model.state_dict()[name]).abs().mean() < 1e-5, name


def test_clipping_bounds_what_the_optimizer_sees(tiny: list[str], text_file: Path) -> None:
    trainer = _trainer(_only(tiny, "train.clip_norm=0.01"), text_file)
    seen = []

    def look(*arguments: object) -> None:
        gradients = [parameter.grad.norm() for parameter in trainer.model.parameters() if parameter.grad is not None]
        seen.append(torch.stack(gradients).norm().item())

    trainer.optimizer.register_step_pre_hook(look)
    update = trainer.step(1)
    assert update.gradient_norm > 0.1
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_a_loss_that_is_no_number_leaves_the_weights(tiny: list[str], text_file: Path) -> None:
    trainer = _trainer(tiny, text_file)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(math.inf)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    said = r"training diverged at step 3: the loss is nan .*; a checkpoint, if there is one, is from before; try a"
    with pytest.raises(ValueError, match=said):
        trainer.step(3)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"optimizer": {}}, "its optimizer must hold AdamW's state of"),
        ({"optimizer": {"state": None}}, "its optimizer must hold AdamW's state of"),
        ({"optimizer": {"state": {0: None}}}, "its optimizer must hold AdamW's state of"),
        ({"optimizer": {"state": {10**6: {}}}}, "its optimizer must hold AdamW's state of"),
        ({"random_state": {}}, "its random_state is not one of this torch's generators"),
        ({"random_state": {"cpu": torch.get_rng_state()[:-8]}}, "its random_state is not one of this torch's"),
        ({"random_state": {"cpu": torch.zeros(3)}}, "its random_state is not one of this torch's generators"),
    ],
)
def test_a_state_that_cannot_be_continued_is_named(
    tiny: list[str], text_file: Path, damage: dict[str, Any], text: str
) -> None:
    trainer = _trainer(tiny, text_file)
    trainer.step(1)
    checkpoint = trainer.checkpoint(1, config_yaml="", curve="")
    with pytest.raises(ValueError, match=f"the checkpoint a.pt cannot be continued: {text}"):
        trainer.restore(replace(checkpoint, **damage), path=Path("a.pt"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", torch.tensor(-1.0)), ("exp_avg", torch.zeros(2)), ("exp_avg_sq", math.nan), ("exp_avg", torch.float64)],
)
def test_means_of_the_optimizer_that_do_not_fit_are_refused(
    tiny: list[str], text_file: Path, key: str, value: Any
) -> None:
    trainer = _trainer(tiny, text_file)
    trainer.step(1)
    checkpoint = copy.deepcopy(trainer.checkpoint(1, config_yaml="", curve=""))
    entry = checkpoint.optimizer["state"][0]
    if isinstance(value, float):
        entry[key].view(-1)[-1] = value
    else:
        entry[key] = entry[key].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(ValueError, match=r"its optimizer must hold AdamW's state of .* parameters, in their shapes"):
        trainer.restore(checkpoint, path=Path("a.pt"))


def test_a_resumed_optimizer_has_the_options_of_its_session(tiny: list[str], text_file: Path) -> None:
    trainer, resumed = _trainer(tiny, text_file), _trainer(_only(tiny, "train.weight_decay=0.5"), text_file)
    trainer.step(1)
    resumed.restore(trainer.checkpoint(1, config_yaml="", curve=""), path=Path("a.pt"))
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.5, 0.0]


@pytest.mark.parametrize("before", [False, True])
def test_torchs_settings_are_as_before_afterwards(before: bool) -> None:
    torch.use_deterministic_algorithms(before)
    try:
        with suppress(KeyError), reproducible(torch.device("cpu")):
            assert torch.are_deterministic_algorithms_enabled()
            raise KeyError
        assert torch.are_deterministic_algorithms_enabled() is before
        assert torch.utils.deterministic.fill_uninitialized_memory is True  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("validates", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_run_is_the_eager_one_and_resumes_bit_for_bit(
    validates: bool, tiny: list[str], text_file: Path
) -> None:
    """The compiled path of training, on two threads: a gradient that both sum in either order would show."""
    torch.set_num_threads(2)
    try:
        overrides = _only(tiny, "feedforward=fused_mlp", "model.dropout=0.1", "fusion=inductor")
        with reproducible(torch.device("cpu")):
            compiled, eager = _trainer(overrides, text_file), _trainer(_only(overrides, "fusion=off"), text_file)
            torch.manual_seed(7)
            losses = [compiled.step(step).loss for step in range(1, 5)]
            validation_loss = compiled.validation_loss() if validates else 0.0
            checkpoint = copy.deepcopy(compiled.checkpoint(4, config_yaml="", curve=""))
            losses += [compiled.step(step).loss for step in range(5, 9)]
            weights = copy.deepcopy(compiled.model.state_dict())
            compiled.restore(checkpoint, path=Path("checkpoint.pt"))
            again = [compiled.step(step).loss for step in range(5, 9)]
        assert again == losses[4:]
        for name, tensor in compiled.model.state_dict().items():
            assert torch.equal(tensor, weights[name]), name
        torch.manual_seed(7)
        for step, loss in enumerate(losses[:4], start=1):
            assert eager.step(step).loss == pytest.approx(loss, abs=1e-5)
        if validates:
            assert eager.validation_loss() == pytest.approx(validation_loss, abs=1e-5)
    finally:
        torch.set_num_threads(1)


def test_the_validation_loss_is_that_of_the_model_without_dropout(tiny: list[str], text_file: Path) -> None:
    plain, dropping = _trainer(tiny, text_file), _trainer(_only(tiny, "model.dropout=0.5"), text_file)
    state = torch.get_rng_state()
    assert dropping.validation_loss() == dropping.validation_loss() == plain.validation_loss()
    assert torch.equal(state, torch.get_rng_state())
    assert plain.validation_loss() == pytest.approx(math.log(256), abs=0.1)
