"""kernel_sums -- attention whose weights are products of features, so that it can sum over the keys first.

    q, y             [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head
    k, v             [B, G, S, C]   G key-value heads, S keys; as many as queries if causal
    features of q    [B, H, T, F]   F features, all non-negative; those of k are [B, G, S, F]
    state            [B, G, F, C]   sum over keys of features(k)^T v; causal: one for each chunk of L tokens
    level            [B, G, T, 1]   features of k may be divided by exp(level), which never decreases along the tokens

    y[t] = sum_s (features(q)[t] . features(k)[s]) v[s] / sum_s (features(q)[t] . features(k)[s])

If not causal, all queries use one state. If causal, a query uses the state of the chunks before its own, and the L
tokens of its own chunk individually. Time and memory grow linearly with T, and no [T, F, C] tensor is created. With
levels, the contribution of an earlier key is multiplied by exp(level of the key - level of the query), which is at most
1, so nothing overflows.

Katharopoulos et al., "Transformers are RNNs", 2020, section 3; the chunks: Hua et al., "Transformer quality in linear
time", 2022, section 3.2.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.implementations import without_autocast
from ..checks import zero_padding
from .inputs import Rotate

Features = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]

# L, in tokens. The states take T / L x F x C numbers, the products inside the chunks T x L: about as many.
_CHUNK: Final = 64
# A smaller sum of weights counts as zero: backward divides features by the sum, and float32 must hold the quotient.
_LEAST_TOTAL: Final = 1e-24


def kernel_attention(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTC: Tensor,
    features: Features,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    rotate: Rotate | None = None,
) -> Tensor:
    """Return the result of each query: [B, H, T, C] in v's dtype; zeros for a query without any allowed key.

    It runs in float32 or wider, also under autocast: a state is a sum over all tokens. Used by favor and linear.

    Args:
        q_BHTC: the queries.
        k_BGTC: the keys.
        v_BGTC: the values.
        features: queries and keys -> their features, all non-negative, and the keys' levels. None means that all levels
            are 0; it is required unless causal.
        causal: whether a query uses only keys up to its own.
        key_padding_mask: bool [B, S], True for a real token.
        rotate: rotates the features in the numerator only.

    >>> q = k = torch.zeros(1, 1, 2, 1)
    >>> kernel_attention(q, k, torch.tensor([[[[1.0], [3.0]]]]), lambda q, k: (q.exp(), k.exp(), None), causal=True)
    tensor([[[[1.],
              [2.]]]])
    """
    wide = torch.promote_types(q_BHTC.dtype, torch.float32)
    with without_autocast(q_BHTC):
        q_BHTF, k_BGTF, level_BGT1 = features(q_BHTC.to(wide), k_BGTC.to(wide))
        k_BGTF = zero_padding(k_BGTF, key_padding_mask)
        values, ones = v_BGTC.to(wide), torch.ones_like(v_BGTC[..., :1], dtype=wide)
        if rotate is None:
            both = _sums(q_BHTF, k_BGTF, torch.cat((values, ones), dim=-1), level_BGT1, causal=causal)
            weighted_BHTC, total_BHT1 = both[..., :-1], both[..., -1:]
        else:
            total_BHT1 = _sums(q_BHTF, k_BGTF, ones, level_BGT1, causal=causal)
            weighted_BHTC = _sums(*rotate(q_BHTF, k_BGTF), values, level_BGT1, causal=causal)
        # No epsilon in the denominator: where the total is small, the numerator is too.
        return (weighted_BHTC / total_BHT1.masked_fill(total_BHT1 < _LEAST_TOTAL, 1.0)).to(v_BGTC.dtype)


def _sums(q_BHTF: Tensor, k_BGTF: Tensor, v_BGTC: Tensor, level_BGT1: Tensor | None, *, causal: bool) -> Tensor:
    """Return sum_s (q[t] . k[s]) v[s], over s <= t if causal, divided by exp(level[t]): [B, H, T, C]."""
    # The R query heads that share keys become additional queries, so that keys and values are not copied.
    groups, tokens = k_BGTF.shape[1], q_BHTF.shape[2]
    q_BGRTF = torch.unflatten(q_BHTF, 1, (groups, -1))
    if not causal:
        state_BGFC = k_BGTF.transpose(-2, -1) @ v_BGTC
        return torch.unflatten(q_BGRTF.flatten(2, 3) @ state_BGFC, 2, (-1, tokens)).flatten(1, 2)
    size = min(_CHUNK, tokens)
    q_BGRNLF, k_BGNLF, v_BGNLC = (_chunks(part, size) for part in (q_BGRTF, k_BGTF, v_BGTC))
    q_BGNXF = q_BGRNLF.movedim(2, 3).flatten(3, 4)  # X = R x L
    products_BGNRLL = torch.unflatten(q_BGNXF @ k_BGNLF.transpose(-2, -1), 3, (-1, size)).tril()
    if level_BGT1 is None:
        states_BGNFC = (k_BGNLF.transpose(-2, -1) @ v_BGNLC).cumsum(2)
        y_BGNXC = q_BGNXF @ _of_chunk_before(states_BGNFC)
    else:
        level_BGNL1 = _chunks(level_BGT1, size)
        last_BGN11 = level_BGNL1[..., -1:, :]
        faded_BGNLF = k_BGNLF * _fading(level_BGNL1, last_BGN11)
        states_BGNFC = _running_sums(faded_BGNLF.transpose(-2, -1) @ v_BGNLC, last_BGN11)
        y_BGNRLC = torch.unflatten(q_BGNXF @ _of_chunk_before(states_BGNFC), 3, (-1, size))
        y_BGNXC = (y_BGNRLC * _fading(_of_chunk_before(last_BGN11), level_BGNL1)[:, :, :, None]).flatten(3, 4)
        products_BGNRLL = products_BGNRLL * _fading(level_BGNL1.transpose(-2, -1), level_BGNL1)[:, :, :, None]
    y_BGNXC = y_BGNXC + products_BGNRLL.flatten(3, 4) @ v_BGNLC
    y_BGRNLC = torch.unflatten(y_BGNXC, 3, (-1, size)).movedim(3, 2)
    return y_BGRNLC.flatten(3, 4)[..., :tokens, :].flatten(1, 2)


def _chunks(x: Tensor, size: int) -> Tensor:
    """Split the tokens into chunks, with zeros after the last token: [..., T, C] -> [..., N, L, C]."""
    return torch.unflatten(F.pad(x, (0, 0, 0, -x.shape[-2] % size)), -2, (-1, size))


def _of_chunk_before(x_BGNFC: Tensor, distance: int = 1) -> Tensor:
    """Return for each chunk the state of the chunk `distance` before it; zeros if there is none."""
    return F.pad(x_BGNFC[:, :, :-distance], (0, 0, 0, 0, distance, 0))


def _fading(earlier: Tensor, later: Tensor) -> Tensor:
    # Levels never decrease, so the clamp changes only hidden entries and those after the last token. It prevents a
    # product of inf and zero.
    return (earlier - later).clamp(max=0.0).exp()


def _running_sums(states_BGNFC: Tensor, level_BGN11: Tensor) -> Tensor:
    """Return for each chunk the sum over it and all earlier chunks, divided by exp(level of the chunk)."""
    # Not cumsum, because no single level fits all chunks. Each step doubles the number of chunks in a sum.
    distance = 1
    while distance < states_BGNFC.shape[2]:
        fading_BGN11 = _fading(_of_chunk_before(level_BGN11, distance), level_BGN11)
        states_BGNFC = states_BGNFC + _of_chunk_before(states_BGNFC, distance) * fading_BGN11
        distance *= 2
    return states_BGNFC
