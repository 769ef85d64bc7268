"""softmax -- softmax(q k^T / sqrt(C), over the allowed keys) v, with the library's own dropout.

q, y   [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head
k, v   [B, G, S, C]   G key-value heads, S keys
mask   broadcastable to [B, H, T, S], True where a query (row) may look at a key (column)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import dropout

__all__ = ["softmax_attention"]


def softmax_attention(
    q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, *, mask: Tensor | None = None, p: float = 0.0
) -> Tensor:
    """Return what each query gathers; one without an allowed key gathers zeros.

    It runs on torch's `scaled_dot_product_attention`. With dropout the softmax is written out, because the mask must be
    the library's own, the same on every backend: that keeps B x H x T x S probabilities for backward. Used by the
    attentions that make the keys of a softmax fewer.

    >>> softmax_attention(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 3, 2), torch.arange(6.0).view(1, 1, 3, 2))
    tensor([[[[2., 3.]]]])
    """
    group = q_BHTC.shape[1] // k_BGSC.shape[1]
    if p == 0:
        return F.scaled_dot_product_attention(q_BHTC, k_BGSC, v_BGSC, attn_mask=mask, enable_gqa=group > 1)
    k_BHSC, v_BHSC = k_BGSC.repeat_interleave(group, dim=1), v_BGSC.repeat_interleave(group, dim=1)
    scores_BHTS = q_BHTC @ k_BHSC.transpose(-2, -1) / math.sqrt(q_BHTC.shape[-1])
    if mask is not None:
        # Not -inf: a row without any allowed key would be 0 / 0, in backward too. Filled twice it is zeros in both.
        scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(scores_BHTS.dtype).min)
    weights_BHTS = scores_BHTS.softmax(-1)
    if mask is not None:
        weights_BHTS = weights_BHTS.masked_fill(~mask, 0.0)
    return dropout(weights_BHTS, p) @ v_BHSC
