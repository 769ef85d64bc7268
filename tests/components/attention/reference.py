"""Attention written out query by query, in the dtype of its input. Used by the tests of multi-head attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from fuselayers.components import MultiHeadAttention

__all__ = ["reference"]


def reference(
    layer: MultiHeadAttention,
    x_BTD: Tensor,
    *,
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    mask: Tensor | None = None,
    memory: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute the layer's result in plain arithmetic; dropout multiplies the probabilities by `kept`."""
    source = x_BTD if memory is None else memory
    batch, tokens, keys = len(x_BTD), x_BTD.shape[1], source.shape[1]
    heads, groups, channels = layer.num_heads, layer.num_kv_heads, layer.head_dim

    def projected(y: Tensor, first: int, number: int) -> Tensor:
        rows = slice(first * channels, (first + number) * channels)
        part = y @ layer.qkv.weight[rows].T + (layer.qkv.bias[rows] if layer.qkv.bias is not None else 0)
        return part.view(batch, y.shape[1], number, channels).transpose(1, 2)

    q, k = projected(x_BTD, 0, heads), projected(source, heads, groups)
    v = projected(source, heads + groups, groups)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
            for y, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    if rotate is not None:
        q, k = rotate(q, k)
    mask_BHTS = None if mask is None else mask.expand(batch, heads, tokens, keys)

    def looks(b: int, h: int, t: int, s: int) -> bool:
        hidden = [
            layer.causal and s > t,
            layer.window is not None and abs(t - s) >= layer.window,
            key_padding_mask is not None and not key_padding_mask[b, s],
            mask_BHTS is not None and not mask_BHTS[b, h, t, s],
        ]
        return not any(hidden)

    rows = []
    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                seen = [s for s in range(keys) if looks(b, h, t, s)]
                g = h * groups // heads
                scores = k[b, g, seen] @ q[b, h, t] * layer.scale
                if layer.soft_cap is not None:
                    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
                if bias is not None:
                    scores = scores + bias[h, t, seen]
                shares = scores.exp()
                total = shares.sum() + (layer.sinks[h].exp() if layer.sinks is not None else 0)
                shares = shares / total * (1 if kept is None else kept[b, h, t, seen])
                rows.append(shares @ v[b, g, seen] if seen else torch.zeros_like(q[b, h, t]))
    mixed = torch.stack(rows).view(batch, tokens, heads * channels)
    return mixed @ layer.out.weight.T + (layer.out.bias if layer.out.bias is not None else 0)
