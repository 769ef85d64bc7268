"""The contract of every norm, a user's included, and each norm against its formula."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import DynamicTanh, LayerNorm, Norm, RMSNorm, SkipNorm, initialise
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, assert_same_values, randomise, run


class MaxNorm(Norm):
    """A user's norm, with nothing but a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


NORMS = [
    lambda: LayerNorm(7),
    lambda: LayerNorm(7, bias=False, eps=0.1),
    lambda: RMSNorm(7),
    lambda: RMSNorm(7, unit_offset=True),
    lambda: DynamicTanh(7),
    lambda: DynamicTanh(7, bias=False),
    lambda: SkipNorm(7),
    lambda: MaxNorm(),
]


def written_out(
    norm: Norm, x: Tensor, residual: Tensor, bias: Tensor | None = None, *, p: float, style: str
) -> Tensor | tuple[Tensor, Tensor]:
    """`norm.add`, with the norm's forward and plain sums."""
    dropped = dropout(x if bias is None else x + bias, p, training=norm.training)
    if style == "pre":
        return norm(dropped) + residual
    total = dropped + residual
    return (norm(total), total) if style == "prenorm" else norm(total)


# Each norm has an op for each style.
@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
@pytest.mark.parametrize(("p", "with_bias"), [(0.0, False), (0.3, True)])
@pytest.mark.parametrize("make", NORMS)
def test_add_in_training(make: object, p: float, style: str, with_bias: bool) -> None:
    norm: Any = randomise(make())
    tensors = [torch.randn(3, 5, 7), torch.randn(3, 5, 7), *([torch.randn(7)] if with_bias else [])]
    expected = run(norm, tensors, call=functools.partial(written_out, norm, p=p, style=style))
    got = run(norm, tensors, call=lambda x, residual, bias=None: norm.add(x, residual, bias=bias, p=p, style=style))
    assert_same_values(expected, got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", NORMS)
def test_parameters_can_start_again(make: object) -> None:
    norm, fresh = make(), make()
    with torch.device("meta"):
        empty = make()
    for used in (randomise(norm), empty.to_empty(device="cpu")):
        used.reset_parameters()
        for name, value in fresh.state_dict().items():
            assert torch.equal(used.state_dict()[name], value), name
        # `initialise` restores a norm's own initial values, whatever its weight means.
        initialise(randomise(used), "bert", num_layers=1)
        for name, value in fresh.state_dict().items():
            assert torch.equal(used.state_dict()[name], value), name


# Each norm has an op for each style, and no op calls the hook of a norm.
@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
@pytest.mark.parametrize("make", NORMS)
def test_a_hook_on_a_norm_runs_where_it_joins_too(make: object, style: str) -> None:
    norm: Any = randomise(make())
    tensors = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    torch.manual_seed(1)
    expected = norm.add(*tensors, p=0.3, style=style)
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    torch.testing.assert_close(norm.add(*tensors, p=0.3, style=style), expected, rtol=1e-5, atol=1e-5)
    assert calls == [1]


@pytest.mark.parametrize(
    ("torchs", "ours", "options"),
    [
        (nn.LayerNorm, LayerNorm, {"bias": True}),
        (nn.LayerNorm, LayerNorm, {"bias": False}),
        (nn.RMSNorm, RMSNorm, {}),
    ],
)
def test_a_norm_of_torch_with_torchs_keys(torchs: type[nn.Module], ours: type[nn.Module], options: Any) -> None:
    theirs, norm = randomise(torchs(7, eps=0.01, **options)), ours(7, eps=0.01, **options)
    assert list(norm.state_dict()) == list(theirs.state_dict())
    norm.load_state_dict(theirs.state_dict())
    assert_same_step(theirs, norm, torch.randn(3, 5, 7))


# Each pair of dtypes rounds at another place; transformers has the same order of operations for all.
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_rms_norm_with_a_unit_offset_is_transformers_gemma(values: torch.dtype, weights: torch.dtype) -> None:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    norm, theirs = RMSNorm(64, unit_offset=True).to(weights), gemma.Gemma3RMSNorm(64).to(weights)
    assert norm.weight.abs().max() == theirs.weight.abs().max() == 0
    with torch.no_grad():
        # Small differences from 1, which a sum in bfloat16 would round away.
        norm.weight.normal_(std=0.003)
    theirs.load_state_dict(norm.state_dict())
    x = torch.randn(8, 64).to(values)
    # Equal up to float32 rounding, two values may round to neighbouring bfloat16 values.
    torch.testing.assert_close(norm(x), theirs(x), rtol=1e-5 if values == torch.float32 else 2**-7, atol=1e-6)


def dyt(norm: DynamicTanh, x: Tensor) -> Tensor:
    """The formula, with tanh as exponentials."""
    grown, shrunk = torch.exp(norm.alpha * x), torch.exp(-norm.alpha * x)
    y = norm.weight * (grown - shrunk) / (grown + shrunk)
    return y if norm.bias is None else y + norm.bias


@pytest.mark.parametrize(("hidden_dim", "bias"), [(1, True), (7, False), (129, True)])
def test_dyt_values_and_gradients(hidden_dim: int, bias: bool) -> None:
    norm: Any = randomise(DynamicTanh(hidden_dim, bias=bias)).double()
    x = torch.randn(2, 3, hidden_dim).double()
    assert_same_step(functools.partial(dyt, norm), norm, x, rtol=1e-9, atol=1e-9)


def test_dyt_names_and_errors() -> None:
    norm = DynamicTanh(7)
    # alpha is [1] as in the authors' code, so that their checkpoints load.
    assert {name: tuple(value.shape) for name, value in norm.state_dict().items()} == {
        "alpha": (1,),
        "weight": (7,),
        "bias": (7,),
    }
    assert repr(norm) == "DynamicTanh(7, alpha=0.5, bias=True)"
    with pytest.raises(ValueError, match=r"^hidden_dim must be at least 1, got 0$"):
        DynamicTanh(0)
