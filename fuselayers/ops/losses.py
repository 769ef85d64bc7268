"""losses -- option checks and reductions that cross_entropy and linear_cross_entropy share."""

import math
from typing import Final

import torch
from torch import Tensor

from ..names import no_such
from .implementations import autocast_dtype
from .shapes import check_dense

__all__ = ["check_loss_options", "check_target", "loss_dtype", "reduce_losses", "row_count"]

_REDUCTIONS: Final = ("mean", "sum", "none")


def check_target(target: Tensor, name: str, rows: Tensor) -> None:
    """Raise unless `target` holds a class index for each row of `rows`, [..., N]."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be an int64 tensor, got {type(target).__name__}")
    if target.dtype != torch.int64:
        advice = "class probabilities are not supported" if target.is_floating_point() else "convert it with .long()"
        raise TypeError(f"target must hold class indices in int64, got {target.dtype}; {advice}")
    check_dense("target", target)
    if target.shape != rows.shape[:-1]:
        wanted = list(rows.shape[:-1])
        raise ValueError(f"target must be {wanted} to fit {name} {list(rows.shape)}, got {list(target.shape)}")
    if target.device != rows.device:
        advice = f"move it with .to({name}.device)"
        raise ValueError(f"target must be on {name}'s device {rows.device}, got {target.device}; {advice}")


def check_loss_options(ignore_index: int, label_smoothing: float, z_loss: float, reduction: str) -> None:
    """Raise unless the options are numbers within their ranges, and the reduction is known."""
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(value, Tensor):
            raise TypeError(f"{name} must be a number, got a tensor; pass {name}.item()")
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must satisfy 0 <= label_smoothing <= 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be finite and not negative, got {z_loss}")
    if reduction not in _REDUCTIONS:
        raise ValueError(no_such("reduction", reduction, _REDUCTIONS))


def loss_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the loss for logits of `dtype`."""
    # As in torch, losses are float32 under autocast: a float16 loss that a GradScaler has scaled would overflow.
    if dtype.itemsize > 2 or autocast_dtype(device) is None:
        return dtype
    return torch.promote_types(dtype, torch.float32)


def reduce_losses(losses: Tensor, count: Tensor | None, reduction: str, dtype: torch.dtype) -> Tensor:
    """Reduce the losses of all rows; `count` is the number of rows for "mean", else None."""
    if reduction != "none":
        losses = losses.sum()
    loss = losses if count is None else losses / count
    return loss if loss.dtype == dtype else loss.to(dtype)  # see elementwise: [no cast that does nothing]


def row_count(reduction: str, target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the divisor of a reduction: for "mean" the number of rows that are not ignored, else None."""
    return (target != ignore_index).sum() if reduction == "mean" else None
