import copy
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuselayers.cli.train.checkpoint import Content, save
from fuselayers.cli.train.data import read_text
from fuselayers.cli.train.engine import Engine
from fuselayers.cli.train.loop import Trainer, reproducible
from fuselayers.cli.train.state import load_state, state_of
from fuselayers.configs import build, compose


def _trainer(overrides: list[str], text_file: Path) -> Trainer:
    config = compose(overrides=overrides)
    torch.manual_seed(0)
    engine, text = Engine(build(config)), read_text(str(text_file))
    return Trainer(engine, text, config=config.train, sequence_length=16, device=torch.device("cpu"))


def test_accumulated_micro_batches_make_the_step_of_one_batch(tiny: list[str], text_file: Path) -> None:
    accumulated = _trainer([*tiny, "train.accumulate=2", "train.clip_norm=0"], text_file)
    update = accumulated.step(1)

    whole = _trainer([*tiny, "train.clip_norm=0"], text_file)
    parts = [accumulated.batch(1, micro_batch=number) for number in range(2)]
    tokens_BT, targets_BT = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    loss = whole.loss(tokens_BT, targets_BT)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([parameter.grad.norm() for parameter in whole.model.parameters() if parameter.grad is not None])
    for group in whole.optimizer.param_groups:
        group["lr"] = update.learning_rate
    whole.optimizer.step()

    assert accumulated.step_tokens == 2 * 4 * 16
    assert update.read()[0] == pytest.approx(loss.item(), abs=1e-6)
    assert update.read()[1] == pytest.approx(norm.norm().item(), rel=1e-5)
    # Adam's first step is the sign of the gradient. Where the gradient is all rounding error, the sign may differ.
    for name, tensor in whole.model.state_dict().items():
        assert (tensor - accumulated.model.state_dict()[name]).abs().mean() < 1e-5, name


def test_clipping_bounds_what_the_optimizer_sees(tiny: list[str], text_file: Path) -> None:
    trainer = _trainer([*tiny, "train.clip_norm=0.01"], text_file)
    seen = []

    def look(*arguments: object) -> None:
        gradients = [parameter.grad.norm() for parameter in trainer.model.parameters() if parameter.grad is not None]
        seen.append(torch.stack(gradients).norm().item())

    trainer.optimizer.register_step_pre_hook(look)
    update = trainer.step(1)
    assert update.read()[1] > 0.1
    assert seen == [pytest.approx(0.01, rel=1e-3)]


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


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_fused_run_is_the_plain_one_and_resumes_bit_for_bit(
    backend: str, tiny: list[str], text_file: Path, tmp_path: Path
) -> None:
    """Train on two threads: sums of gradients whose order depends on the threads would show."""
    overrides = [*tiny, "feedforward=fused_mlp", "model.dropout=0.1", f"fusion={backend}"]
    fused, plain = _trainer(overrides, text_file), _trainer([*overrides, "fusion=off"], text_file)
    torch.set_num_threads(2)
    try:
        with reproducible(torch.device("cpu")):
            losses = [fused.step(step).read()[0] for step in (1, 2)]
            validation_loss = fused.validation_loss()
            path = save(tmp_path, state_of(fused.model, fused.optimizer), Content(2))
            losses += [fused.step(step).read()[0] for step in (3, 4)]
            weights = copy.deepcopy(fused.model.state_dict())
            load_state(fused.model, fused.optimizer, path)
            again = [fused.step(step).read()[0] for step in (3, 4)]
    finally:
        torch.set_num_threads(1)
    assert again == losses[2:]
    for name, tensor in fused.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    for step, loss in enumerate(losses[:2], start=1):
        assert plain.step(step).read()[0] == pytest.approx(loss, abs=1e-5)
    assert plain.validation_loss() == pytest.approx(validation_loss, abs=1e-5)


def test_a_step_draws_its_own_numbers_whatever_was_drawn_before(tiny: list[str], text_file: Path) -> None:
    overrides = [*tiny, "model.dropout=0.3", "train.accumulate=2"]
    first, second = _trainer(overrides, text_file), _trainer(overrides, text_file)
    # Two steps, and two micro-batches, then differ only in their masks.
    same = first.batch(1)
    for trainer in (first, second):
        trainer.batch = lambda step, micro_batch=0: same  # type: ignore[method-assign]
        trainer.config = replace(trainer.config, learning_rate=1e-30, min_learning_rate=0.0, weight_decay=0.0)
    losses = [first.step(step).read()[0] for step in (1, 2)]
    torch.manual_seed(999)
    torch.rand(5)
    second.validation_loss()
    assert [second.step(step).read()[0] for step in (2, 1)] == losses[::-1]
    assert losses[0] != losses[1]


def test_the_validation_loss_is_that_of_the_model_without_dropout(tiny: list[str], text_file: Path) -> None:
    plain, dropping = _trainer(tiny, text_file), _trainer([*tiny, "model.dropout=0.5"], text_file)
    state = torch.get_rng_state()
    assert dropping.validation_loss() == dropping.validation_loss() == plain.validation_loss()
    assert torch.equal(state, torch.get_rng_state())
    assert plain.validation_loss() == pytest.approx(math.log(256), abs=0.1)
