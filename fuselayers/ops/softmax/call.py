"""The public functions: y = softmax(scale * scores + mask) over the last dimension, and its logarithm.

`formula` has the formula, the values saved for backward and the bytes moved.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..implementations import Op, differentiable
from ..shapes import check_dense, check_floating, check_rows
from .backward import softmax_backward
from .formula import gradient_formula, reference, softmax_formula
from .forward import softmax_forward

__all__ = ["log_softmax", "log_softmax_reference", "softmax", "softmax_reference"]


def softmax(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Return softmax(scale * scores + mask) over the last dimension, of scores' shape and dtype.

    A row without visible positions is 0, with gradient 0. A hidden position is 0.

    Args:
        scores: [..., S], or [..., T, S] if causal; any float dtype.
        mask: bool, True is visible; or floating, added to the scaled scores, -inf hides. Broadcastable to scores'
            shape. The kernels read it through its strides, for any broadcast ([S], [T, S], [B, 1, 1, S], [B, H, T, S],
            ...). They copy it only if its leading dimensions need more than three strides. A floating mask may need a
            gradient.
        causal: query t sees keys 0..t: aligned top left, for any T and S. With a mask, both apply.
        scale: a finite factor of the scores, applied in float32.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: scores have no dimension, or fewer than two if causal; the mask does not fit scores or is on another
            device; scale is not finite; or the backend is unknown.
        TypeError: scores are not dense and floating, the mask is neither bool nor floating, or scale is no number.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> softmax(torch.zeros(3, 3), torch.tensor([True, True, False]), causal=True)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000]])
    """
    return _run(scores, mask, causal, scale, backend, log=False)


def log_softmax(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Return log(softmax(scale * scores + mask)) over the last dimension, of scores' shape and dtype.

    A hidden position is -inf, with gradient 0, and so is every position of a row without visible ones. The arguments
    and errors are those of `softmax`.

    >>> import torch
    >>> log_softmax(torch.zeros(2), torch.tensor([0.0, -torch.inf]))
    tensor([0., -inf])
    """
    return _run(scores, mask, causal, scale, backend, log=True)


def softmax_reference(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0
) -> Tensor:
    """The definition of softmax, in plain torch."""
    return reference(scores, mask, causal=causal, scale=scale, log=False)


def log_softmax_reference(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0
) -> Tensor:
    """The definition of log_softmax, in plain torch."""
    return reference(scores, mask, causal=causal, scale=scale, log=True)


def _run(scores: Tensor, mask: Tensor | None, causal: bool, scale: float, backend: str, *, log: bool) -> Tensor:
    check_rows("scores", scores)
    _check_mask(mask, scores)
    _check_scale(scale)
    if causal and scores.dim() < 2:
        raise ValueError(
            f"causal scores must be [..., T, S], queries by keys, got {list(scores.shape)}; leave causal=False"
        )
    y: Tensor = _op(backend, (scores, mask), (causal, scale, log))
    return y


def _check_mask(mask: Tensor | None, scores: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool or floating tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"mask must be bool, True where a score takes part, or floating, added to the scores, got {mask.dtype}"
        )
    (check_dense if mask.dtype == torch.bool else check_floating)("mask", mask)
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    if mask.dim() > scores.dim() or not all(size in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"mask must be broadcastable to scores' shape {list(scores.shape)}, got {list(mask.shape)}")
    if mask.device != scores.device:
        raise ValueError(
            f"mask must be on scores' device {scores.device}, got {mask.device}; move it with .to(scores.device)"
        )


def _check_scale(scale: float) -> None:
    if not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"scale must be a finite number, got {type(scale).__name__}; pass a float")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number, got {scale}")


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, causal: bool, scale: float, log: bool) -> Tensor:
        y: Tensor = softmax_forward(scores, mask, causal, scale, log)
        ctx.save_for_backward(y)
        ctx.options = causal, scale, log
        ctx.mask_is = None if mask is None else (mask.shape, mask.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        causal, scale, log = ctx.options
        # The formula is differentiable again: y is an output, so autograd continues from it to scores.
        gradient = gradient_formula if torch.is_grad_enabled() else softmax_backward
        if not ctx.needs_input_grad[1]:
            return gradient(dy, y, causal, scale, log), None, None, None, None
        dz = gradient(dy, y, causal, 1.0, log)
        shape, dtype = ctx.mask_is
        return dz * scale if ctx.needs_input_grad[0] else None, dz.to(dtype).sum_to_size(shape), None, None, None


_op = Op("softmax", softmax_formula, differentiable(_Softmax, softmax_forward), cpu_from=None)
