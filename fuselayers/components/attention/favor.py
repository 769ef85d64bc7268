"""favor -- softmax attention estimated by positive random features, as in the Performer.

    x, y   [B, T, D]      B batch, T tokens, D model
    q      [B, H, T, C]   H query heads, C channels of a head
    k, v   [B, G, S, C]   G key-value heads; query head h uses key-value head h // (H / G); S = T without a memory
    w      [F, C]         F random directions, orthogonal to each other in groups of C

    phi(x) = exp(w . x' - |x'|^2 / 2) / sqrt(F),  x' = x / C^(1/4)
             so that the mean of phi(q) . phi(k) over all w is exp(q . k / sqrt(C))
    y[t]   = out(sum_s (phi(q[t]) . phi(k[s])) v[s] / sum_s (phi(q[t]) . phi(k[s])))     over s <= t if causal

Choromanski et al., "Rethinking attention with Performers", 2021, sections 2.3 (positive) and 2.4 (orthogonal).
"""

import functools
import math
from typing import ClassVar

import torch
from torch import Tensor

from ...ops import dropout as dropout_op
from ..option import Count, Probability, Size, checked
from ..registry import register
from .kernel_sums import kernel_attention
from .packed_heads import CrossHeads


@register("attention", "favor")
class FavorAttention(CrossHeads):
    """Softmax attention with unbiased estimates of exp(score). Time and memory grow linearly with the tokens.

    The random directions are a buffer in the state_dict, shared by all heads. They stay the same until `redraw`.

    Features are computed in float32 or wider, relative to the largest feature among the keys that a token attends to. A
    feature below about exp(-87) of the largest becomes 0.

    The arguments and errors of `PackedHeads`, and:

    Args:
        num_features: F, number of random directions; None for head_dim * ln(head_dim), the paper's choice.
        seed: the seed of the random directions.
        dropout: probability of dropping a value of a head's result in training, 0 <= dropout <= 1. Attention
            probabilities are not dropped, since they are never computed individually.
        causal: whether a token looks only at itself and the tokens before it.

    >>> FavorAttention(8, num_heads=1).directions.shape
    torch.Size([16, 8])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})
    shown: ClassVar[tuple[str, ...]] = ("num_features", "seed", "dropout", "causal")
    directions: Tensor

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        num_features: Size | None = None,
        seed: Count = 0,
        dropout: Probability = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__(hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias)
        if num_features is None:
            num_features = max(1, int(self.head_dim * math.log(self.head_dim)))
        self.num_features = num_features
        self.seed = seed
        self.dropout = dropout
        self.causal = causal
        self.register_buffer("directions", torch.empty(num_features, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions from the seed again. The projections reset themselves."""
        self.redraw(self.seed)

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw new directions, for example every thousand steps with the step number as the seed.

        Args:
            seed: the same seed gives the same directions, on every device.
        """
        self.directions.copy_(_orthogonal_directions(self.num_features, self.head_dim, seed=seed))

    def mix(self, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        features = functools.partial(
            _features, directions_FC=self.directions, key_padding_mask=key_padding_mask, causal=self.causal
        )
        mixed_BHTC = kernel_attention(
            q_BHTC, k_BGTC, v_BGTC, features, causal=self.causal, key_padding_mask=key_padding_mask
        )
        shard = self.layout.shard(mixed_BHTC, 1)
        return dropout_op(mixed_BHTC, self.dropout, training=self.training, shard=shard)


def _features(
    q_BHTC: Tensor, k_BGTC: Tensor, *, directions_FC: Tensor, key_padding_mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    q_BHTF, k_BGTF = _exponents(q_BHTC, directions_FC), _exponents(k_BGTC, directions_FC)
    # Note: [exponents are shifted] A factor of all features of a query, or of all keys that it attends to, cancels in
    # the quotient; so does 1 / sqrt(F). So exponents are shifted to make the largest 0: for a query by its own largest
    # exponent; for keys by the largest among all real keys, or in causal attention among those up to the key, which is
    # the key's level. Features far below the largest become 0, and nothing overflows.
    if key_padding_mask is not None:
        lowest = torch.finfo(k_BGTF.dtype).min
        k_BGTF = k_BGTF.masked_fill(~key_padding_mask[:, None, :, None], lowest)
    with torch.no_grad():
        shift_BHT1 = q_BHTF.amax(-1, keepdim=True)
        level_BGT1 = k_BGTF.amax(-1, keepdim=True)
        level_BGT1 = level_BGT1.cummax(-2).values if causal else level_BGT1.amax(-2, keepdim=True)
    return (q_BHTF - shift_BHT1).exp(), (k_BGTF - level_BGT1).exp(), level_BGT1 if causal else None


def _exponents(x: Tensor, directions_FC: Tensor) -> Tensor:
    """Return the logarithms of the features, up to a constant: [..., C] -> [..., F]."""
    x = x * x.shape[-1] ** -0.25
    return x @ directions_FC.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2


def _orthogonal_directions(num_features: int, channels: int, *, seed: int) -> Tensor:
    """Return directions [F, C]: each is normally distributed, and they are orthogonal in groups of C."""
    blocks = -(-num_features // channels)
    # On the CPU, so that every device gets the same directions; in float64, so that they are orthogonal up to float32
    # rounding.
    generator = torch.Generator("cpu").manual_seed(seed)
    normal = torch.randn(2, blocks, channels, channels, generator=generator, dtype=torch.float64, device="cpu")
    orthogonal, upper = torch.linalg.qr(normal[0])
    # Without the signs of the diagonal, Q would not be uniformly distributed.
    signs = upper.diagonal(dim1=-2, dim2=-1).sign()
    directions: Tensor = orthogonal * signs[:, None] * normal[1].norm(dim=-1, keepdim=True)
    return directions.flatten(0, 1)[:num_features]
