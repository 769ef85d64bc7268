"""`add` means the same for every norm: these tests run on both, and on a norm from outside."""

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import LayerNorm, Norm, RMSNorm
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise


class MaxNorm(Norm):
    """A norm that somebody brings along: it has a forward and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


NORMS = [lambda: LayerNorm(7), lambda: LayerNorm(7, bias=False, eps=0.1), lambda: RMSNorm(7), lambda: MaxNorm()]


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
def test_add_drops_nothing_in_eval(make: object) -> None:
    norm = randomise(make()).eval()  # type: ignore[operator]
    x, residual = torch.randn(4, 7), torch.randn(4, 7)
    normed, total = norm.add(x, residual, p=0.9)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    torch.testing.assert_close(normed, norm(x + residual))


@pytest.mark.parametrize("make", NORMS)
def test_errors_of_add(make: object) -> None:
    norm, x = make(), torch.randn(2, 7)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^no norm style 'prenrom'; did you mean 'prenorm'\?"):
        norm.add(x, x, style="prenrom")
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[2, 7\], got \[7\]"):
        norm.add(x, x[0])
    with pytest.raises(ValueError, match=r"^dropout probability p must satisfy 0 <= p < 1, got 1"):
        norm.add(x, x, p=1.0)
