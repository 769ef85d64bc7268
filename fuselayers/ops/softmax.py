"""softmax and log_softmax -- over the last dimension of scale * scores + mask, in plain torch.

    scores, y   [..., T, S]   any float dtype; T queries, S keys (without causality [..., S])
    mask        broadcastable to scores' shape, as in torch's scaled_dot_product_attention: bool, True takes part; or
                floating and added to the scores, -inf hides

Causal: query t sees keys 0..t, for any T and S. That is `torch.ones(T, S).tril()`, aligned top left, as torch's
scaled_dot_product_attention documents its `is_causal`. Queries at the end of longer keys need a mask:
`torch.ones(T, S, dtype=torch.bool).tril(S - T)`.

Hidden positions become 0, or -inf in log_softmax, and have no influence: a NaN there changes nothing. A row without
visible positions is 0, or -inf, throughout, and its gradient is 0; torch.softmax would give NaN. Visible positions
behave as in torch: with NaN or inf among them, or with only -inf, all of them become NaN.

The arithmetic is float32 (float64 where scores are), scale and mask included; y is rounded once, to scores' dtype.
Saved for backward: the softmax in float32 at least, and the visible positions, one byte per element of the mask.
"""

import math

import torch
from torch import Tensor

from .shapes import check_dense, check_floating, check_rows

__all__ = ["log_softmax", "softmax"]


def softmax(scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0) -> Tensor:
    """Return softmax(scale * scores + mask) over the last dimension, of scores' shape and dtype.

    A row without visible positions is 0, with gradient 0. A hidden position is 0.

    Args:
        scores: [..., S], or [..., T, S] if causal; any float dtype.
        mask: bool, True is visible; or floating, added to the scaled scores, -inf hides. Broadcastable to scores'
            shape. A floating mask may need a gradient.
        causal: query t sees keys 0..t: aligned top left, for any T and S. With a mask, both apply.
        scale: a finite factor of the scores, applied in float32.

    Raises:
        ValueError: scores have no dimension, or fewer than two if causal; the mask does not fit scores or is on another
            device; or scale is not finite.
        TypeError: scores are not dense and floating, the mask is neither bool nor floating, or scale is not a number.

    >>> import torch
    >>> softmax(torch.zeros(3, 3), torch.tensor([True, True, False]), causal=True)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000]])
    """
    return _softmax(scores, mask, causal, scale, log=False)


def log_softmax(scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0) -> Tensor:
    """Return log(softmax(scale * scores + mask)) over the last dimension, of scores' shape and dtype.

    A hidden position is -inf, with gradient 0, and so is every position of a row without visible positions. The
    arguments and errors are those of `softmax`.

    >>> import torch
    >>> log_softmax(torch.zeros(2), torch.tensor([0.0, -torch.inf]))
    tensor([0., -inf])
    """
    return _softmax(scores, mask, causal, scale, log=True)


def _softmax(scores: Tensor, mask: Tensor | None, causal: bool, scale: float, *, log: bool) -> Tensor:
    check_rows("scores", scores)
    _check_mask(mask, scores)
    _check_scale(scale)
    if causal and scores.dim() < 2:
        raise ValueError(
            f"causal scores must be [..., T, S], queries by keys, got {list(scores.shape)}; leave causal=False"
        )
    function = torch.log_softmax if log else torch.softmax
    visible = _visible(scores, mask, causal)
    if visible is None and scale == 1:
        y = function(scores, -1)  # computes in float32 at least, and rounds once
        return y if y.dtype == scores.dtype else y.to(scores.dtype)
    wide = scores if scores.dtype.itemsize > 2 else scores.float()
    wide = wide if scale == 1 else wide * scale
    if visible is None:
        return function(wide, -1).to(scores.dtype)
    hidden_value = torch.full((), -math.inf, dtype=wide.dtype, device=wide.device)
    if mask is not None:
        if mask.dtype != torch.bool:
            wide = wide + mask.to(wide.dtype)
        # A row without visible positions is filled with 0. Filled with -inf it would become NaN, in backward too, and
        # anomaly detection would report that. On a CPU any() takes a tenth of the time for bytes as for bools.
        hidden_value = torch.where(visible.to(torch.uint8).any(-1, keepdim=True).bool(), hidden_value, 0.0)
    y = function(torch.where(visible, wide, hidden_value), -1)
    return torch.where(visible, y, -math.inf if log else 0.0).to(scores.dtype)


def _visible(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    if mask is not None and mask.dtype != torch.bool:
        mask = mask != -math.inf
    if not causal:
        return mask
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    return visible if mask is None else visible & mask


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
