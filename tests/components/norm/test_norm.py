"""What every norm does: these tests run on all, and on a norm from outside."""

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import DynamicTanh, LayerNorm, Norm, RMSNorm, SkipNorm, initialise
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise


class MaxNorm(Norm):
    """A norm that somebody brings along: it has a forward and nothing else."""

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


class Add(nn.Module):
    """`norm.add` in the place of forward."""

    def __init__(self, norm: Norm, p: float, style: str) -> None:
        super().__init__()
        self.norm, self.p, self.style = norm, p, style

    def forward(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        joined: Tensor | tuple[Tensor, Tensor] = self.norm.add(x, residual, bias=bias, p=self.p, style=self.style)  # type: ignore[call-overload]
        return joined


class WrittenOut(Add):
    """The same, from the norm's forward and plain sums."""

    def forward(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        dropped = dropout(x if bias is None else x + bias, self.p, training=self.training)
        if self.style == "pre":
            return self.norm(dropped) + residual
        total = dropped + residual
        return (self.norm(total), total) if self.style == "prenorm" else self.norm(total)


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("make", NORMS)
def test_add_in_training(make: object, p: float, style: str, with_bias: bool) -> None:
    norm = randomise(make())  # type: ignore[operator]
    tensors = [torch.randn(3, 5, 7), torch.randn(3, 5, 7), *([torch.randn(7)] if with_bias else [])]
    assert_same_step(WrittenOut(norm, p, style), Add(norm, p, style), *tensors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", NORMS)
def test_parameters_can_start_again(make: object) -> None:
    norm, fresh = make(), make()  # type: ignore[operator]
    with torch.device("meta"):
        empty = make()  # type: ignore[operator]
    for used in (randomise(norm), empty.to_empty(device="cpu")):
        used.reset_parameters()
        for name, value in fresh.state_dict().items():
            assert torch.equal(used.state_dict()[name], value), name
        # An init function leaves a norm as it starts, whatever its weight means.
        initialise(randomise(used), "bert", num_layers=1)
        for name, value in fresh.state_dict().items():
            assert torch.equal(used.state_dict()[name], value), name


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
@pytest.mark.parametrize("make", NORMS)
def test_errors_of_add(make: object, style: str) -> None:
    norm, x = make(), torch.randn(2, 7)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[2, 7\], got \[7\]$"):
        norm.add(x, x[0], style=style)
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[7\], got \[2, 7\]$"):
        norm.add(x[0], x, style=style)
    with pytest.raises(ValueError, match=r"^bias must be \[7\] to fit x \[2, 7\], got \[1\]$"):
        norm.add(x, x, bias=torch.zeros(1), style=style)
    with pytest.raises(TypeError, match=r"^residual must be a floating-point tensor, got torch.int64"):
        norm.add(x, x.long(), style=style)
    with pytest.raises(ValueError, match=r"^dropout probability p must satisfy 0 <= p < 1, got 1"):
        norm.add(x, x, p=1.0, style=style)


@pytest.mark.parametrize("make", NORMS)
def test_an_unknown_style(make: object) -> None:
    norm, x = make(), torch.randn(2, 7)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^no norm style 'prenrom'; did you mean 'prenorm'\?"):
        norm.add(x, x, style="prenrom")


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
@pytest.mark.parametrize("make", NORMS)
def test_a_hook_on_a_norm_runs_where_it_joins_too(make: object, style: str) -> None:
    norm = randomise(make())  # type: ignore[operator]
    tensors = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    torch.manual_seed(1)
    expected = Add(norm, 0.3, style)(*tensors)
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    torch.testing.assert_close(Add(norm, 0.3, style)(*tensors), expected, rtol=1e-5, atol=1e-5)
    assert calls == [1]
