"""kernel_sums -- attention whose weights are products of features, so that sums over the keys come first.

    q, y             [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head
    k, v             [B, G, T, C]   G key-value heads
    features of q    [B, H, T, F]   F features, none negative; of k [B, G, T, F]
    state            [B, G, F, C]   sum over keys of features(k)^T v; causal: one for each chunk of L tokens

    y[t] = sum_s (features(q)[t] . features(k)[s]) v[s] / sum_s (features(q)[t] . features(k)[s])

Not causal, one state serves all queries. Causal, a query takes the state of the chunks before its own, and looks at the
L tokens of its own chunk one by one: time and memory grow with T, and no [T, F, C] is ever made.

Katharopoulos et al., "Transformers are RNNs", 2020, section 3; the chunks: Hua et al., "Transformer quality in linear
time", 2022, section 3.2.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocast import without_autocast
from .inputs import Rotate
from .padding import zero_padding

__all__ = ["HIGHEST_EXPONENT", "Features", "kernel_attention"]

Features = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# L, in tokens. The states take T / L x F x C, what is written out inside the chunks T x L: as much for the usual C.
_CHUNK: Final = 64
# Weights that add up to less count as none: backward divides features, up to exp(HIGHEST_EXPONENT), by their total, and
# float32 must hold the quotient.
_LEAST_TOTAL: Final = 1e-24
HIGHEST_EXPONENT: Final = 24.0


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
    """Return what each query gathers: [B, H, T, C] in v's dtype; one with nothing to look at gathers zeros.

    It runs in float32 at least, under autocast too: a state is a sum over all tokens. Used by favor and linear.

    Args:
        q_BHTC: the queries.
        k_BGTC: the keys.
        v_BGTC: the values.
        features: queries and keys -> their features, none negative and none above exp(HIGHEST_EXPONENT).
        causal: whether a query looks only at keys up to its own.
        key_padding_mask: bool [B, T], True for a real token.
        rotate: turns the features above the fraction bar, and leaves those below it.

    >>> q = k = torch.zeros(1, 1, 2, 1)
    >>> kernel_attention(q, k, torch.tensor([[[[1.0], [3.0]]]]), lambda q, k: (q.exp(), k.exp()), causal=True)
    tensor([[[[1.],
              [2.]]]])
    """
    wide = torch.promote_types(q_BHTC.dtype, torch.float32)
    with without_autocast(q_BHTC):
        q_BHTF, k_BGTF = features(q_BHTC.to(wide), k_BGTC.to(wide))
        k_BGTF = zero_padding(k_BGTF, key_padding_mask)
        values, ones = v_BGTC.to(wide), torch.ones_like(v_BGTC[..., :1], dtype=wide)
        if rotate is None:
            both = _sums(q_BHTF, k_BGTF, torch.cat((values, ones), dim=-1), causal=causal)
            weighted_BHTC, total_BHT1 = both[..., :-1], both[..., -1:]
        else:
            total_BHT1 = _sums(q_BHTF, k_BGTF, ones, causal=causal)
            weighted_BHTC = _sums(*rotate(q_BHTF, k_BGTF), values, causal=causal)
        # No small number is added below the bar: where the total is small, what is above it is too.
        return (weighted_BHTC / total_BHT1.masked_fill(total_BHT1 < _LEAST_TOTAL, 1.0)).to(v_BGTC.dtype)


def _sums(q_BHTF: Tensor, k_BGTF: Tensor, v_BGTC: Tensor, *, causal: bool) -> Tensor:
    """Return sum_s (q[t] . k[s]) v[s], over s <= t if causal: [B, H, T, C]."""
    # The R query heads that share keys lie in a row, as if they were further queries: keys and values are not copied.
    groups, tokens = k_BGTF.shape[1:3]
    q_BGRTF = torch.unflatten(q_BHTF, 1, (groups, -1))
    if not causal:
        state_BGFC = k_BGTF.transpose(-2, -1) @ v_BGTC
        return torch.unflatten(q_BGRTF.flatten(2, 3) @ state_BGFC, 2, (-1, tokens)).flatten(1, 2)
    size = min(_CHUNK, tokens)
    q_BGRNLF, k_BGNLF, v_BGNLC = (
        torch.unflatten(F.pad(part, (0, 0, 0, -tokens % size)), -2, (-1, size)) for part in (q_BGRTF, k_BGTF, v_BGTC)
    )
    q_BGNXF = q_BGRNLF.movedim(2, 3).flatten(3, 4)  # X = R x L
    states_BGNFC = (k_BGNLF.transpose(-2, -1) @ v_BGNLC).cumsum(2)
    before_BGNFC = F.pad(states_BGNFC[:, :, :-1], (0, 0, 0, 0, 1, 0))
    products_BGNRLL = torch.unflatten(q_BGNXF @ k_BGNLF.transpose(-2, -1), 3, (-1, size)).tril()
    y_BGNXC = q_BGNXF @ before_BGNFC + products_BGNRLL.flatten(3, 4) @ v_BGNLC
    y_BGRNLC = torch.unflatten(y_BGNXC, 3, (-1, size)).movedim(3, 2)
    return y_BGRNLC.flatten(3, 4)[..., :tokens, :].flatten(1, 2)
