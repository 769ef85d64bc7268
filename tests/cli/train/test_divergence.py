from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers import build
from fuselayers.cli.train.data import read_text
from fuselayers.cli.train.divergence import Finding, first_not_finite
from fuselayers.cli.train.loop import Trainer
from fuselayers.configs import compose

_TINY = (
    "model.hidden_dim=16",
    "model.num_layers=3",
    "model.context_length=16",
    "attention.num_heads=2",
    "model.dropout=0.1",
    "feedforward=mlp",
)


def _model(*overrides: str) -> Any:
    torch.manual_seed(0)
    return build("gpt_nano", [*_TINY, "fusion=off", *overrides])


def _run(model: nn.Module) -> Callable[[], object]:
    tokens_BT = torch.arange(32).view(2, 16)

    def run() -> None:
        torch.manual_seed(1)
        model(tokens_BT, tokens_BT).backward()

    return run


class _Gradient(torch.autograd.Function):
    """Identity, whose backward multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _multiply_gradient(module: nn.Module, factor: float) -> None:
    module.register_forward_hook(lambda module, args, output: _Gradient.apply(output, factor))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("fusion", [("fusion=off",), ("fusion=eager", "fusion.scope=model"), ("fusion.scope=block",)])
def test_a_weight_that_is_no_number_is_found_in_fused_models_too(fusion: Sequence[str]) -> None:
    model = _model(*fusion)
    with torch.no_grad():
        model.blocks[1].feedforward.up.weight[3, 2] = torch.nan
    assert first_not_finite(model, _run(model)) == (
        "the first layer with an output that is not finite, from finite inputs, is blocks.1.feedforward.up (Linear), "
        "whose weight is not finite"
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_layer_whose_own_code_goes_wrong_is_named_and_not_the_ones_behind_it(number: float) -> None:
    model = _model()
    model.blocks[2].attention.register_forward_hook(lambda module, args, output: output.clone().fill_(number))
    assert first_not_finite(model, _run(model)) == (
        "the first layer with an output that is not finite, from finite inputs, is blocks.2.attention "
        "(MultiHeadAttention)"
    )


def test_an_overflow_is_found_where_it_happens() -> None:
    model = _model()
    with torch.no_grad():
        for layer in (model.blocks[0].feedforward.up, model.blocks[0].feedforward.down):
            layer.weight.mul_(1e25)
    found = first_not_finite(model, _run(model))
    # The weights themselves are finite, so none is named.
    assert found.endswith("from finite inputs, is blocks.0.feedforward.down (Linear)")


def test_a_gradient_is_found_in_the_order_of_backward() -> None:
    model = _model()
    _multiply_gradient(model.blocks[1].feedforward.up, torch.nan)
    assert first_not_finite(model, _run(model)) in [
        "every layer's output is finite; the first gradient that is not, in the order of backward, is that of "
        f"blocks.1.feedforward.up.{name}"
        for name in ("weight", "bias")
    ]


def test_gradients_whose_norm_alone_overflows() -> None:
    model = _model()
    # 1e20 squared is above float32's 3.4e38.
    _multiply_gradient(model.norm, 1e22)
    found = first_not_finite(model, _run(model))
    assert found.startswith("without fusion every output and every gradient is finite; the largest gradient is ")
    size, name = found.split("largest gradient is ")[1].split(", of ")
    assert float(size) > 1e19
    assert name in dict(model.named_parameters())


def test_a_compiled_model_is_watched_by_its_own_names() -> None:
    model = _model()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    run = _run(model)
    run()
    with torch.no_grad():
        model.blocks[0].feedforward.down.bias[0] = torch.nan
    assert "is blocks.0.feedforward.down (Linear), whose bias is not finite" in first_not_finite(model, run)


def test_a_step_that_cannot_run_again_says_why() -> None:
    def run() -> None:
        raise RuntimeError("CUDA out of memory")

    assert first_not_finite(nn.Linear(1, 1), run) == (
        "the layer is not known, since the step cannot run again without fusion: CUDA out of memory"
    )


def test_a_finite_call_without_backward_names_nothing() -> None:
    model = _model()
    tokens_BT = torch.zeros(1, 4, dtype=torch.int64)
    assert first_not_finite(model, lambda: model(tokens_BT)) == "without fusion every layer's output is finite"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_step_runs_again_with_its_own_batches_and_masks(tiny: list[str], accumulate: int) -> None:
    changed = ("fusion=", "model.dropout=", "train.accumulate=")
    overrides = [text for text in tiny if not text.startswith(changed)]
    overrides += ["model.dropout=0.5", f"train.accumulate={accumulate}", "fusion=eager"]
    config = compose(overrides=overrides)
    torch.manual_seed(0)
    model: Any = build(config)
    text = read_text(config.data.path)
    trainer = Trainer(model, text, config=config.train, sequence_length=16, device=torch.device("cpu"))
    trainer.step(1)
    losses: list[Tensor] = []
    inner = trainer.loss

    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        losses.append(inner(tokens_BT, targets_BT))
        return losses[-1] * torch.inf

    trainer.loss = loss  # type: ignore[method-assign]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text = r"^training diverged at step 2: the loss is inf and the norm of its gradient nan; every layer's output is "
    with pytest.raises(
        ValueError, match=text + r"finite; the first gradient .* is that of \S+; a checkpoint, if there"
    ):
        trainer.step(2)
    assert len(losses) == 2 * accumulate
    for first, again in zip(losses[:accumulate], losses[accumulate:], strict=True):
        torch.testing.assert_close(again, first)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_earliest_finding_of_all_processes_is_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    nn.init.constant_(model[0].weight, float("nan"))
    own: list[Finding | None] = []

    def agreed(found: Finding | None) -> Finding | None:
        own.append(found)
        others = [Finding(1, 1, "a gradient"), Finding(0, 1, "an earlier layer"), None]
        return min(one for one in (found, *others) if one is not None)

    model = nn.Sequential(nn.Identity(), *model)
    assert first_not_finite(model, lambda: model(torch.ones(1, 1)), agreed=agreed) == "an earlier layer"
    assert own[0] is not None
    assert own[0][:2] == (0, 2)


def test_a_process_that_fails_in_the_second_run_ends_the_others() -> None:
    def run() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        first_not_finite(nn.Linear(1, 1), run, agreed=lambda found: found)
