"""Dropout that saves a seed instead of a mask: alone, or after a dense layer and before a residual and a norm."""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .... import ops
from ...._torch.dispatch import PLAIN_TENSORS
from ..parts import is_dropout, is_layer_norm, is_linear
from ..rule import Rule
from .linear import linear


def probability(drop: nn.Dropout) -> float:
    """Return the probability with which a dropout layer drops in this call."""
    return drop.p if drop.training else 0.0


def dropout(self: Any, input: Tensor) -> Tensor:
    """Dropout that saves no mask."""
    if not input.is_floating_point():
        return F.dropout(input, self.p, self.training)
    return ops.dropout(input, self.p, training=self.training)


def dense_dropout_residual_norm(
    self: nn.Module, *, x: Tensor, residual: Tensor, dense: nn.Module, drop: nn.Dropout, norm: nn.LayerNorm
) -> Tensor:
    """norm(dropout(dense(x)) + residual), as in BERT. Of dropout and sum only the norm's input is saved."""
    x, p = linear(x, dense), probability(drop)
    # Under autocast the sum and the norm have other dtypes.
    if not _is_alike(x, residual, norm) or _is_autocast(x):
        return F.layer_norm(ops.dropout(x, p) + residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return ops.bias_dropout_residual_layer_norm(
        *(x, residual), weight=norm.weight, norm_bias=norm.bias, p=p, eps=norm.eps, style="post"
    )


def _is_alike(x: Any, residual: Any, norm: nn.LayerNorm) -> bool:
    """Return whether the op supports these: plain tensors of one shape and one dtype, which is the norm's too."""
    plain = all(type(tensor) in PLAIN_TENSORS for tensor in (x, residual))
    return plain and residual.shape == x.shape and residual.dtype == x.dtype == norm.weight.dtype


def _is_autocast(x: Tensor) -> bool:
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def _is_not_in_place(module: Any) -> bool:
    return not module.inplace


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "dense_dropout_residual_norm",
        of=(
            """
            def forward(self, x, residual):
                return self.norm(self.drop(self.dense(x)) + residual)
            """,
        ),
        forward=dense_dropout_residual_norm,
        parts={"norm": is_layer_norm, "drop": is_dropout, "dense": is_linear},
    ),
    Rule("dropout", of=nn.Dropout, forward=dropout, fits=_is_not_in_place),
)
