"""The formula and the reference of softmax and log_softmax, over the last dimension.

    scores, y   [..., T, S]   any float dtype; T queries, S keys (without causality [..., S])
    mask        broadcastable to scores' shape, as in torch's scaled_dot_product_attention: bool, True takes part; or
                floating and added to the scores, -inf hides

    z = scale * scores (+ mask),   e = exp(z - max)                max and sum over visible positions

    softmax       y = e / sum(e)             dscores = scale * y * (dy - sum(dy * y) / sum(y))
    log_softmax   y = z - max - log(sum(e))  dscores = scale * (dy - exp(y) * sum(dy))

The gradient of an additive mask is dscores / scale, summed over what was broadcast.

Causal: query t sees keys 0..t, for any T and S. That is `torch.ones(T, S).tril()`, aligned top left, as torch's
scaled_dot_product_attention documents its `is_causal`. Queries at the end of longer keys need a mask:
`torch.ones(T, S, dtype=torch.bool).tril(S - T)`.

Hidden positions are 0, log_softmax -inf, and have no influence: a NaN there changes nothing. A row without visible
positions is all that, and its gradient is 0; torch.softmax would give NaN. Visible positions behave as in torch: with
NaN or inf among them, or with only -inf, all of them become NaN. The gradient of log_softmax is 0 where y is -inf.

The arithmetic is float32 (float64 where scores are), scale and mask included; y is rounded once, to scores' dtype.

Note: [sum(y)] It is 1, but for the rounding of y. Dividing by it makes the gradient a sum of differences within dy.
Without it, a row with one large weight would lose its gradient in 16 bits: y * (dy - sum(dy * y)) would be the
difference of nearly equal numbers.

Saved for backward: y, neither scores nor mask. The eager formula saves the softmax in float32 at least, and what is
visible, one byte per element of the mask.

Bytes moved, in elements of y: 2 forward (read scores, write y) and the bytes of the mask, 3 backward (read dy and y,
write dscores). The kernels reach that for rows of up to 8192 elements, which one program holds in registers; they do
not read scores above the diagonal. Longer rows are split: scores and mask, or dy and y, are read twice.

The online sum of long rows: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math

import torch
from torch import Tensor


def softmax_formula(scores: Tensor, mask: Tensor | None, causal: bool, scale: float, log: bool = False) -> Tensor:
    """Return softmax or log_softmax, in plain torch."""
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
        # A row without visible positions is filled with 0: only -inf would give NaN within, in backward too, which
        # anomaly detection reports. On a CPU any() of bytes takes a tenth of the time of bools; they are converted,
        # since torch 2.11's Inductor cannot view bools as bytes.
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


def gradient_formula(dy: Tensor, y: Tensor, causal: bool, scale: float, log: bool = False) -> Tensor:
    """Return the gradient of scores, in plain torch."""
    wide = torch.promote_types(y.dtype, torch.float32)
    hidden = y == (-math.inf if log else 0)
    wide_dy, wide_y = dy.to(wide).masked_fill(hidden, 0.0), y.to(wide)
    if log:
        dscores = scale * (wide_dy - wide_y.exp() * wide_dy.sum(-1, keepdim=True))
    else:
        total = wide_y.sum(-1, keepdim=True)
        mean = (wide_dy * wide_y).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
        dscores = scale * wide_y * (wide_dy - mean)
    return dscores.masked_fill(hidden, 0.0).to(y.dtype)


def reference(scores: Tensor, mask: Tensor | None, *, causal: bool, scale: float, log: bool = False) -> Tensor:
    """Return the definition of both ops, in plain torch."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    visible = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    visible = visible.tril() if causal else visible
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        wide, visible = wide + mask, visible & (mask != -math.inf)
    y = wide.masked_fill(~visible, -math.inf).softmax(-1)
    if log:
        y = wide.masked_fill(~visible, -math.inf).log_softmax(-1)
    return y.masked_fill(~visible, -math.inf if log else 0.0).to(scores.dtype)
