"""multi_head -- every token takes a weighted mean of the values of the tokens it may look at.

    x, y   [B, T, D]      B batch, T tokens, D model
    q      [B, H, T, C]   H query heads, C channels of a head
    k, v   [B, G, T, C]   G key-value heads; query head h uses key-value head h // (H / G)
    mask   [B, 1, T, T]   True where a query (row) may look at a key (column)

    y = out(softmax(q k^T / sqrt(C), over the allowed keys) v)

Vaswani et al. 2017, section 3.2; grouped queries: Ainslie et al. 2023.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import dropout
from ..ranges import Probability, Size, in_range
from ..registry import register
from .inputs import Rotate

__all__ = ["MultiHeadAttention"]


@register("attention", "multi_head")
class MultiHeadAttention(nn.Module):
    """Self-attention with one packed projection for queries, keys and values.

    It runs on torch's `scaled_dot_product_attention`. With dropout in training it writes the softmax out, because the
    mask must be the library's own, the same on every backend: that keeps B x H x T x T probabilities for backward.

    Args:
        hidden_dim: D, the width of the model.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads; None for as many as query heads.
        head_dim: channels of a head; None for hidden_dim / num_heads.
        bias: whether both projections have a bias.
        dropout: probability of dropping an attention probability in training, 0 <= dropout < 1.
        causal: whether a token looks only at itself and the tokens before it.

    Raises:
        ValueError: heads that do not divide, a size below one, or a dropout outside [0, 1).

    >>> attention = MultiHeadAttention(8, num_heads=4, num_kv_heads=2)
    >>> attention.qkv.out_features
    16
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})

    @in_range
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        dropout: Probability = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if head_dim is None:
            if hidden_dim % num_heads:
                raise ValueError(
                    f"hidden_dim must be a multiple of num_heads, got {hidden_dim} and {num_heads}; or give head_dim"
                )
            head_dim = hidden_dim // num_heads
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(hidden_dim, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.out = nn.Linear(num_heads * head_dim, hidden_dim, bias=bias)

    def forward(self, x_BTD: Tensor, *, rotate: Rotate | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return what every token gathers.

        Args:
            x_BTD: [B, T, D].
            rotate: puts positions into queries and keys, as `Position.rotate` does; None leaves them.
            key_padding_mask: bool [B, T], True for a real token, False for padding, which nobody looks at. A token
                with nothing to look at gathers zeros.

        Raises:
            ValueError: x or the mask has another shape, or the mask is not bool.
        """
        if x_BTD.dim() != 3 or x_BTD.shape[-1] != self.qkv.in_features:
            raise ValueError(f"x must be [B, T, {self.qkv.in_features}], got {list(x_BTD.shape)}")
        if key_padding_mask is not None:
            _check_padding(key_padding_mask, x_BTD)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_BHTC, k_BGTC, v_BGTC = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x_BTD).split([n * self.head_dim for n in heads], dim=-1)
        )
        if rotate is not None:
            q_BHTC, k_BGTC = rotate(q_BHTC, k_BGTC)
        if self.training and self.dropout > 0:
            mask = _mask(x_BTD, key_padding_mask, self.causal)
            mixed_BHTC = _dropped_attention(q_BHTC, k_BGTC, v_BGTC, mask, p=self.dropout)
        else:
            # is_causal lets the kernel skip half the work, so a mask is written out only where padding asks for one.
            mask = None if key_padding_mask is None else _mask(x_BTD, key_padding_mask, self.causal)
            mixed_BHTC = F.scaled_dot_product_attention(
                q_BHTC,
                k_BGTC,
                v_BGTC,
                attn_mask=mask,
                is_causal=self.causal and mask is None,
                enable_gqa=self.num_kv_heads < self.num_heads,
            )
        y_BTD: Tensor = self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        return y_BTD

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"dropout={self.dropout}, causal={self.causal}"
        )


def _check_padding(mask: Tensor, x_BTD: Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != x_BTD.shape[:2]:
        raise ValueError(
            f"key_padding_mask must be torch.bool {list(x_BTD.shape[:2])} to fit x {list(x_BTD.shape)}, True for a "
            f"real token, got {mask.dtype} {list(mask.shape)}"
        )


def _mask(x_BTD: Tensor, key_padding_mask: Tensor | None, causal: bool) -> Tensor | None:
    """Return which keys each query may look at: bool, broadcastable to [B, 1, T, T], or None for all."""
    tokens = x_BTD.shape[1]
    allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=x_BTD.device).tril() if causal else None
    if key_padding_mask is None:
        return allowed
    real_B11T = key_padding_mask[:, None, None, :]
    return real_B11T if allowed is None else real_B11T & allowed


def _dropped_attention(q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, mask: Tensor | None, *, p: float) -> Tensor:
    """Return attention with dropout on its probabilities, in plain torch: [B, H, T, C]."""
    group = q_BHTC.shape[1] // k_BGTC.shape[1]
    k_BHTC, v_BHTC = k_BGTC.repeat_interleave(group, dim=1), v_BGTC.repeat_interleave(group, dim=1)
    scores_BHTT = q_BHTC @ k_BHTC.transpose(-2, -1) / math.sqrt(q_BHTC.shape[-1])
    if mask is not None:
        # Not -inf: a row without any allowed key would be 0 / 0, in backward too. Filled twice it is zeros in both.
        scores_BHTT = scores_BHTT.masked_fill(~mask, torch.finfo(scores_BHTT.dtype).min)
    weights_BHTT = scores_BHTT.softmax(-1)
    if mask is not None:
        weights_BHTT = weights_BHTT.masked_fill(~mask, 0.0)
    return dropout(weights_BHTT, p) @ v_BHTC
