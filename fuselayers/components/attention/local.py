"""local -- softmax attention of every token to those less than `window` tokens away.

    x, y   [B, T, D]       B batch, T tokens, D model
    q      [B, H, T, C]    H query heads, C channels of a head
    k, v   [B, G, T, C]    G key-value heads; query head h uses key-value head h // (H / G)

    y[t] = out(softmax(q[t] k^T / sqrt(C), over s with |t - s| < window, s <= t if causal) v)

The queries are split into N blocks of W = window. A block looks at S keys: those of its own block and the block before,
and unless causal those of the block after.

    queries of a block   [B N, H, W, C]
    keys of a block      [B N, G, S, C]   S = 2 W, or 3 W if not causal
    mask                 [B N, 1, W, S]

Beltagy et al., "Longformer", 2020, section 3.1; causal: Jiang et al., "Mistral 7B", 2023, section 2.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..option import Probability, Size, checked
from ..registry import register
from .kernels import attend
from .masks import Rules
from .packed_heads import PackedHeads


@register("attention", "local")
class LocalAttention(PackedHeads):
    """Attention to neighbours. Its time and memory grow with the number of tokens times the window.

    The arguments and errors of `PackedHeads`, and:

    Args:
        window: the range of attention in tokens. A token looks at itself and the tokens less than `window` away, on
            both sides, or only before it if causal.
        dropout: probability of dropping an attention probability in training, 0 <= dropout <= 1.
        causal: whether a token looks only at itself and the tokens before it.

    >>> LocalAttention(8, num_heads=2, window=3).window
    3
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})
    shown: ClassVar[tuple[str, ...]] = ("window", "dropout", "causal")

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        window: Size = 128,
        dropout: Probability = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__(hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias)
        self.window = window
        self.dropout = dropout
        self.causal = causal

    def mix(self, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        batch, _, tokens, _ = q_BHTC.shape
        size = min(self.window, tokens)
        end = -tokens % size
        blocks = (tokens + end) // size
        q_BHNWC = torch.unflatten(F.pad(q_BHTC, (0, 0, 0, end)), 2, (blocks, size))
        q_XHWC = q_BHNWC.movedim(2, 1).flatten(0, 1)  # X = B x N
        around = (size, end if self.causal else end + size)
        span = (2 if self.causal else 3) * size
        k_XGSC, v_XGSC = (_spans(part, span, size, around) for part in (k_BGTC, v_BGTC))
        mask_NWS = _band(tokens, span, size, around, causal=self.causal, device=q_BHTC.device)
        mask_BNWS = mask_NWS.expand(batch, -1, -1, -1)
        if key_padding_mask is not None:
            real_BNS = F.pad(key_padding_mask, around).unfold(1, span, size)
            mask_BNWS = mask_BNWS & real_BNS[:, :, None]
        rules = Rules(scale=1 / math.sqrt(self.head_dim), mask=mask_BNWS.flatten(0, 1)[:, None])
        mixed_XHWC = attend(q_XHWC, k_XGSC, v_XGSC, rules, p=self.dropout if self.training else 0.0, layout=self.layout)
        mixed_BHNWC = torch.unflatten(mixed_XHWC, 0, (batch, blocks)).movedim(1, 2)
        return mixed_BHNWC.flatten(2, 3)[:, :, :tokens]


def _spans(x_BGTC: Tensor, span: int, size: int, around: tuple[int, int]) -> Tensor:
    """Return the keys or values that each block of queries looks at: [B, G, T, C] -> [B N, G, S, C]."""
    spans_BGNCS = F.pad(x_BGTC, (0, 0, *around)).unfold(2, span, size)
    return spans_BGNCS.movedim(2, 1).transpose(-2, -1).flatten(0, 1)


def _band(tokens: int, span: int, size: int, around: tuple[int, int], *, causal: bool, device: torch.device) -> Tensor:
    """Return which keys of its span each query of a block may look at: bool [N, W, S]."""
    key_NS = torch.arange(-around[0], tokens + around[1], device=device).unfold(0, span, size)
    query_NW = key_NS[:, size : 2 * size]
    distance_NWS = query_NW[:, :, None] - key_NS[:, None]
    near_NWS = (distance_NWS < size) & (distance_NWS >= 0 if causal else distance_NWS > -size)
    return near_NWS & ((key_NS >= 0) & (key_NS < tokens))[:, None]
