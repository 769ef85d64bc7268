"""Each attention written out in full matrices or plain loops, in the dtype of its input.

A reference has the name of its attention, gets the layer and the arguments of its `forward`, and calls none of the
layer's functions.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fuselayers.components import FourierMix, MultiHeadAttention, PoolingMix


def heads_of(layer: Any, x: Tensor, rotate: Any = None, memory: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, H, T, C] with as many key heads as query heads."""
    heads, groups = layer.num_heads, layer.num_kv_heads
    of_x, of_keys = (
        (tokens @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias))
        .view(*tokens.shape[:2], heads + 2 * groups, layer.head_dim)
        .transpose(1, 2)
        for tokens in (x, x if memory is None else memory)
    )
    q, k, v = of_x[:, :heads], of_keys[:, heads : heads + groups], of_keys[:, heads + groups :]
    if rotate is not None:
        q, k = rotate(q, k)
    of_query = [h * groups // heads for h in range(heads)]
    return q, k[:, of_query], v[:, of_query]


def joined(layer: Any, mixed_BHTC: Tensor) -> Tensor:
    mixed = torch.cat(mixed_BHTC.unbind(1), -1)
    return mixed @ layer.out.weight.T + (0 if layer.out.bias is None else layer.out.bias)


def allowed(tokens: int, keys: int, real_BS: Any, *, causal: bool = False, window: int | None = None) -> Tensor:
    """Return which keys each query may look at: bool [B, 1, T, S]."""
    distance = torch.arange(tokens)[:, None] - torch.arange(keys)
    pairs = (distance.abs() < (tokens + keys if window is None else window)) & (distance >= (0 if causal else -keys))
    real_BS = torch.ones(1, keys, dtype=torch.bool) if real_BS is None else real_BS
    return pairs & real_BS[:, None, None]


def same_document(documents_BT: Tensor) -> Tensor:
    """Return which pairs of tokens share a document: bool [B, 1, T, T]."""
    return torch.stack([row[:, None] == row for row in documents_BT])[:, None]


def normed(weights: Tensor, added: Tensor | float = 0.0) -> Tensor:
    """Divide the weights of each query by their sum; a query without any weight keeps zeros."""
    below = weights.sum(-1, keepdim=True) + added
    return weights / torch.where(below > 0, below, 1)


def multi_head(
    layer: MultiHeadAttention,
    x_BTD: Tensor,
    *,
    rotate: Any = None,
    distance_bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    memory: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Dropout multiplies the probabilities by `kept`."""
    q, k, v = heads_of(layer, x_BTD, None, memory)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
            for y, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    if rotate is not None:
        q, k = rotate(q, k)
    scores = q @ k.mT * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if distance_bias is not None:
        query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        scores = scores + distance_bias[:, key - query + q.shape[2] - 1]
    pairs = allowed(q.shape[2], k.shape[2], key_padding_mask, causal=layer.causal, window=layer.window)
    pairs = pairs if mask is None else pairs & mask
    pairs = pairs if documents is None else pairs & same_document(documents)
    sink = 0.0 if layer.sinks is None else layer.sinks.exp()[:, None, None]
    shares = normed(scores.exp() * pairs, sink)
    return joined(layer, (shares if kept is None else shares * kept) @ v)


def favor(layer: Any, x: Tensor, *, rotate: Any = None, key_padding_mask: Any = None, memory: Any = None) -> Tensor:
    q, k, v = heads_of(layer, x, rotate, memory)
    pairs = allowed(q.shape[2], k.shape[2], key_padding_mask, causal=layer.causal)
    w, scale = layer.directions, layer.head_dim**0.25
    q, k = (
        torch.exp(x / scale @ w.T - ((x / scale) ** 2).sum(-1, keepdim=True) / 2) / math.sqrt(layer.num_features)
        for x in (q, k)
    )
    return joined(layer, normed(q @ k.mT * pairs) @ v)


def linear(layer: Any, x_BTD: Tensor, *, rotate: Any = None, key_padding_mask: Any = None) -> Tensor:
    q, k, v = heads_of(layer, x_BTD)
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    turned_q, turned_k = (q, k) if rotate is None else rotate(q, k)
    pairs = allowed(q.shape[2], k.shape[2], key_padding_mask, causal=layer.causal)
    below = (q @ k.mT * pairs).sum(-1, keepdim=True)
    return joined(layer, (turned_q @ turned_k.mT * pairs) @ v / torch.where(below > 0, below, 1))


def local(
    layer: Any, x_BTD: Tensor, *, rotate: Any = None, key_padding_mask: Any = None, documents: Any = None
) -> Tensor:
    q, k, v = heads_of(layer, x_BTD, rotate)
    band = allowed(q.shape[2], k.shape[2], key_padding_mask, causal=layer.causal, window=layer.window)
    band = band if documents is None else band & same_document(documents)
    return joined(layer, normed((q @ k.mT / math.sqrt(layer.head_dim)).exp() * band) @ v)


def linformer(layer: Any, x_BTD: Tensor, *, rotate: Any = None, key_padding_mask: Any = None) -> Tensor:
    """The whole context, with zeros for padded and missing tokens."""
    q, k, v = heads_of(layer, x_BTD, rotate)
    of_keys, of_values = layer.key_projection.weight, layer.value_projection.weight
    whole = torch.zeros(2, *k.shape[:2], of_keys.shape[1], layer.head_dim, dtype=k.dtype)
    real = torch.ones(x_BTD.shape[:2]) if key_padding_mask is None else key_padding_mask.to(k.dtype)
    whole[:, :, :, : x_BTD.shape[1]] = torch.stack((k, v)) * real[:, None, :, None]
    keys = torch.einsum("pl,bhlc->bhpc", of_keys, whole[0])
    values = torch.einsum("pl,bhlc->bhpc", of_values, whole[1])
    return joined(layer, (q @ keys.mT / math.sqrt(layer.head_dim)).softmax(-1) @ values)


def means(x_HTC: Tensor, most: int) -> Tensor:
    """The means of segments of nearly equal length: [H, T, C] -> [H, M, C]."""
    tokens = x_HTC.shape[1]
    segments: list[list[int]] = [[] for _ in range(min(most, tokens))]
    for token in range(tokens):
        segments[token * len(segments) // tokens].append(token)
    return torch.stack([x_HTC[:, at].mean(1) for at in segments], 1)


def nystrom(layer: Any, x: Tensor, *, rotate: Any = None, key_padding_mask: Any = None, memory: Any = None) -> Tensor:
    """Row by row, with the padding taken out of the row first."""
    q, k, v = heads_of(layer, x, rotate, memory)
    root = math.sqrt(layer.head_dim)
    rows = []
    for b, tokens in enumerate([x.shape[1]] * len(x)):
        real = list(range(k.shape[2])) if key_padding_mask is None else key_padding_mask[b].nonzero().flatten().tolist()
        mixed = torch.zeros_like(q[b])
        if real:
            q_means = means(q[b] if memory is not None else q[b][:, real], layer.num_landmarks)
            k_means = means(k[b][:, real], layer.num_landmarks)
            a = (q_means @ k_means.mT / root).softmax(-1)
            z = torch.stack([head.T / (head.sum(0).max() * head.sum(1).max()) for head in a])
            identity = torch.eye(q_means.shape[1], dtype=a.dtype)
            for _ in range(layer.inverse_iterations):
                z = z @ (13 * identity - a @ z @ (15 * identity - a @ z @ (7 * identity - a @ z))) / 4
            looks = (q[b] @ k_means.mT / root).softmax(-1)
            gathers = (q_means @ k[b][:, real].mT / root).softmax(-1)
            mixed = looks @ z @ (gathers @ v[b][:, real])
        if layer.value_conv is not None:
            filters, half = layer.value_conv.weight[:, 0], layer.value_conv.weight.shape[2] // 2
            near = [[filters[:, s - t + half] * v[b][:, s] for s in real if abs(s - t) <= half] for t in range(tokens)]
            mixed = mixed + torch.stack([sum(terms, torch.zeros_like(v[b][:, 0])) for terms in near], 1)
        rows.append(mixed)
    return joined(layer, torch.stack(rows))


def fourier_mix(layer: FourierMix, x_BTD: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
    tokens, channels = x_BTD.shape[1:]
    t, d = torch.arange(tokens, dtype=x_BTD.dtype), torch.arange(channels, dtype=x_BTD.dtype)
    of_tokens, of_channels = t[:, None] * t / tokens, d[:, None] * d / channels
    angles = 2 * math.pi * (of_tokens[:, None, :, None] + of_channels[None, :, None, :])
    x = x_BTD if key_padding_mask is None else x_BTD * key_padding_mask[..., None]
    return torch.einsum("tdse,bse->btd", angles.cos(), x)


def pooling(layer: PoolingMix, x_BTD: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
    tokens = x_BTD.shape[1]
    near = allowed(tokens, tokens, key_padding_mask, causal=layer.causal, window=layer.window)
    return normed(near[:, 0].to(x_BTD.dtype)) @ x_BTD - x_BTD
