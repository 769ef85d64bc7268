"""RMS norms that save only x.

Four variants are in use. Llama rounds before the multiplication with the weight, Olmo after it. Gemma's weight is
around zero. T5 casts to the weight's dtype if that has 16 bits.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from .... import ops
from ...._torch.dispatch import is_compiling
from ....ops.normalise import rms_norm_saves_x_only
from ...plain import is_parameter
from ..parts import is_number
from ..recomputed import recomputed_in_backward
from ..rule import Rule

_HALF: Final = (torch.float16, torch.bfloat16)


def _saving_x(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a norm to make it a module's forward that saves only x."""

    @functools.wraps(norm)
    def forward(self: nn.Module, *, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # A compiler decides itself what is saved.
        if is_compiling() or rms_norm_saves_x_only(x, weight):
            return norm(x, weight, eps)
        return recomputed_in_backward(functools.partial(norm, eps=eps), x, weight)

    return forward


@_saving_x
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)), in the wider dtype of both: Llama's."""
    return _normalised(x, weight, eps).to(torch.promote_types(x.dtype, weight.dtype))


@_saving_x
def rms_norm_as_x(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)), in x's dtype: Olmo's."""
    return _normalised(x, weight, eps).to(x.dtype)


@_saving_x
def rms_norm_from_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), in x's dtype: Gemma's."""
    return _normalised(x, 1.0 + weight.float(), eps).to(x.dtype)


@_saving_x
def wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)), in the weight's dtype if that has 16 bits, else in float32 at least: T5's."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dtype = weight.dtype if weight.dtype in _HALF else torch.promote_types(wide, weight.dtype)
    return _normalised(x.to(wide), weight, eps).to(dtype)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.shape == x.shape[-1:] and x.is_floating_point():
        return ops.rms_norm(x, weight=weight, eps=eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))


def _rule(name: str, forward: Callable[..., Any], *written: str) -> Rule:
    return Rule(name, of=written, forward=forward, parts={"weight": is_parameter, "eps": is_number})


RULES: Final[tuple[Rule, ...]] = (
    _rule(
        "rms_norm",
        rms_norm,
        """
        def forward(self, x):
            wide = x.to(torch.float32)
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        """,
        """
        def forward(self, x):
            normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
            return normal.type_as(x) * self.weight
        """,
    ),
    _rule(
        "rms_norm",
        rms_norm_as_x,
        """
        def forward(self, x):
            wide = x.to(torch.float32)
            return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)
        """,
    ),
    _rule(
        "rms_norm_from_one",
        rms_norm_from_one,
        """
        def forward(self, x):
            normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
            return (normal * (1.0 + self.weight.float())).type_as(x)
        """,
    ),
    _rule(
        "wide_rms_norm",
        wide_rms_norm,
        """
        def forward(self, x):
            y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
            if self.weight.dtype in [torch.float16, torch.bfloat16]:
                y = y.to(self.weight.dtype)
            return self.weight * y
        """,
    ),
)
