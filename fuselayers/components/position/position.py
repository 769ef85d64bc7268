"""The base of the positions, and all of them but rotary: vectors added to embeddings, and biases added to scores.

x, y   [B, T, D]      B batch, T tokens, D model
q, k   [B, H, T, C]   H heads (fewer for k if queries are grouped), C channels of a head
bias   [H, N]         N = S + T - 1 distances of S = first + T keys from T queries, from 1 - S to T - 1

learned      y = x + table[:T], with one vector for each position of the context, as in GPT-2 and BERT
sinusoidal   y = x + table[:T], table[t, 2 i] = sin(t * base^(-2 i / D)), table[t, 2 i + 1] the cosine
             Vaswani et al. 2017, section 3.5
alibi        bias[h, n] = -slope[h] * |distance n|; for H heads and P, the largest power of two up to H,
             slope[h] = 2^(-8 (h + 1) / P) if h < P, else 2^(-4 (2 (h - P) + 1) / P), every second slope of 2 P heads
             Press, Smith, Lewis, "Train short, test long", 2021, section 3, and the authors' released code
relative     bias[h, n] = table[bucket(distance n), h], table [num_buckets, H]; unless causal, keys that follow have
             half of the buckets; with n buckets in a direction, distances below n / 2 have one each, longer ones share
             buckets, which grow logarithmically up to max_distance, and all beyond are in the last
             Raffel et al. 2020, section 2.1; the buckets of mesh_tensorflow's relative_position_bucket
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_length
from ..layout import WHOLE, Layout
from ..option import Positive, Size, checked
from ..registry import register


class Position(nn.Module):
    """The base of the positions. A subclass overrides `forward`, `rotate` or `distance_bias`, which do nothing here.

    `first` is the position of the first token: 0, or during generation the number of earlier tokens.

    >>> x = torch.ones(1, 2, 3)
    >>> Position()(x) is x
    True
    """

    def forward(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """Return the token embeddings with their positions: [B, T, D] -> [B, T, D]."""
        return x_BTD

    def rotate(self, q_BHTC: Tensor, k_BGTC: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the same tokens with their positions."""
        return q_BHTC, k_BGTC

    def distance_bias(self, x_BTD: Tensor, *, first: int = 0) -> Tensor | None:
        """Return the bias of the scores for the tokens of x and all keys up to the last: [H, first + 2 T - 1].

        Entry n is for a key whose position minus the query's is n + 1 - first - T. Only the dtype, the device and the
        number of tokens of x matter. None means no bias.
        """
        return None

    def check_length(self, tokens: int) -> None:
        """Raise ValueError for a sequence that is too long; models call it before they are traced."""

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless `rotate` supports this number of channels; models call it when they are built."""

    @property
    def needs(self) -> frozenset[str]:
        """The attention inputs that this position needs: "rotate", "distance_bias", both or neither."""
        hooks = ("rotate", "distance_bias")
        return frozenset(hook for hook in hooks if getattr(type(self), hook) is not getattr(Position, hook))


def _distances(x_BTD: Tensor, first: int) -> Tensor:
    """Return the distances of a `distance_bias`, in order: int64 [first + 2 T - 1].

    >>> _distances(torch.zeros(1, 2, 8), 1)
    tensor([-2, -1,  0,  1])
    """
    tokens = x_BTD.shape[-2]
    return torch.arange(1 - first - tokens, tokens, device=x_BTD.device)


@register("position", "none")
class NoPosition(Position):
    """Adds no positions: a causal model can learn positions without them (Haviv et al. 2022)."""


@register("position", "learned")
class LearnedPosition(Position):
    """Adds a learned vector per position.

    Args:
        context_length: L, the longest sequence in tokens.
        hidden_dim: D, the width of the model.

    Raises:
        ValueError: a size is below one; in `forward`, the sequence is longer than the context.

    >>> LearnedPosition(16, 8).table.weight.shape
    torch.Size([16, 8])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"context_length", "hidden_dim"})

    @checked
    def __init__(self, context_length: Size, hidden_dim: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(context_length, hidden_dim)
        # torch's own init has a standard deviation of 1, which would drown token embeddings with the usual 0.02.
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [B, T, D], first + T at most the context length."""
        end = first + x_BTD.shape[-2]
        self.check_length(end)
        return x_BTD + self.table.weight[first:end]

    def check_length(self, tokens: int) -> None:
        """Raise ValueError for more tokens than the context has."""
        check_length(tokens, self.table.num_embeddings, built="model")


@register("position", "sinusoidal")
class SinusoidalPosition(Position):
    """Adds a fixed vector per position; works for any length. If D is odd, the last wave has only a sine.

    The vectors have a norm of sqrt(D / 2), far above that of token embeddings with the usual deviation 0.02; the paper
    scales those by sqrt(D), as the embedding `token` does with `scale`.

    Args:
        base: the longest wave is about `base` times as long as the shortest, which is 2 pi tokens.

    Raises:
        ValueError: base is not positive and finite.

    >>> SinusoidalPosition()(torch.zeros(1, 2, 2))
    tensor([[[0.0000, 1.0000],
             [0.8415, 0.5403]]])
    """

    @checked
    def __init__(self, *, base: Positive = 10000.0) -> None:
        super().__init__()
        self.base = base

    def forward(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [B, T, D] in x's dtype, rounded once."""
        # No table is stored; see Note: [no stored table] in rotary.py.
        tokens, hidden_dim = x_BTD.shape[-2:]
        wave = torch.arange((hidden_dim + 1) // 2, device=x_BTD.device, dtype=torch.float32)
        position = torch.arange(first, first + tokens, device=x_BTD.device, dtype=torch.float32)
        angle = position[:, None] * self.base ** (wave * (-2 / hidden_dim))
        table_TD = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[:, :hidden_dim]
        return (x_BTD + table_TD).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"base={self.base}"


@register("position", "alibi")
class ALiBiPosition(Position):
    """Adds a bias to the scores that grows with the distance. It has no parameters and works for any length.

    The bias is the same on both sides of a token, so it does not depend on whether the attention is causal.

    Args:
        num_heads: H, the number of query heads.

    Raises:
        ValueError: num_heads is below one, or None because the attention has no heads.

    >>> ALiBiPosition(num_heads=2).distance_bias(torch.zeros(1, 2, 8))
    tensor([[-0.0625, -0.0000, -0.0625],
            [-0.0039, -0.0000, -0.0039]])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"num_heads"})
    layout: Layout = WHOLE

    @checked
    def __init__(self, *, num_heads: Size | None) -> None:
        super().__init__()
        self.num_heads = _check_has_heads("alibi", num_heads)

    def distance_bias(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [H, first + 2 T - 1] in x's dtype, rounded once."""
        # No table is stored; see Note: [no stored table] in rotary.py.
        distance_N = _distances(x_BTD, first).abs()
        return (distance_N * -self._slopes(x_BTD.device)[:, None]).to(x_BTD.dtype)

    def _slopes(self, device: torch.device) -> Tensor:
        power = 1 << (self.num_heads.bit_length() - 1)
        place = torch.arange(1, self.num_heads + 1, device=device, dtype=torch.float32)
        # The additional slopes, from 2 P heads, are half a step before those of P heads.
        place = torch.where(place <= power, place, place - power - 0.5)
        return self.layout.own(torch.exp2(place * (-8 / power)), 0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


@register("position", "relative")
class RelativePosition(Position):
    """A learned bias of the scores, per head and range of distances. Every layer adds it; it works for any length.

    Args:
        num_heads: H, the number of query heads.
        num_buckets: number of ranges of distances, in both directions together.
        max_distance: distance in tokens from which on all distances share a bucket.
        causal: whether a token looks only at itself and the tokens before it, which then have all the buckets.

    Raises:
        ValueError: num_heads is below one, or None because the attention has no heads; too few buckets; or a
            max_distance within the buckets of single distances.

    >>> position = RelativePosition(num_heads=2, num_buckets=4, max_distance=3, causal=True)
    >>> position.buckets(torch.arange(-4, 1))
    tensor([3, 3, 2, 1, 0])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"num_heads", "causal"})

    # In other classes `table` holds vectors; see `carry_weights`.
    weights_mean: ClassVar[str] = "biases of distances"

    @checked
    def __init__(
        self, *, num_heads: Size | None, num_buckets: Size = 32, max_distance: Size = 128, causal: bool = False
    ) -> None:
        super().__init__()
        fewest = 2 if causal else 4
        if num_buckets < fewest:
            kind = "causal" if causal else "not causal"
            raise ValueError(f"num_buckets must be at least {fewest} where attention is {kind}, got {num_buckets}")
        self.max_distance = max_distance
        self.causal = causal
        self._of_a_side = num_buckets if causal else num_buckets // 2
        self._single = self._of_a_side // 2
        if max_distance <= self._single:
            raise ValueError(
                f"max_distance must be above {self._single}, got {max_distance}: with {num_buckets} buckets, each "
                "smaller distance has a bucket; raise it, or use fewer buckets"
            )
        self.table = nn.Embedding(num_buckets, _check_has_heads("relative", num_heads))
        # As in `LearnedPosition`: torch's own init, with a deviation of 1, would outweigh the scores.
        nn.init.normal_(self.table.weight, std=0.02)

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance, the key's position minus the query's: int64, any shape -> the same shape.

        If attention is causal, later keys are in bucket 0.
        """
        if self.causal:
            side, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
        else:
            side, distance = (distance > 0) * self._of_a_side, distance.abs()
        # Term by term as in T5's code, in float32, because rounding decides if a logarithm is close to an integer.
        far = torch.log(distance.clamp(min=self._single).float() / self._single)
        far = far / math.log(self.max_distance / self._single) * (self._of_a_side - self._single)
        shared = (self._single + far.long()).clamp(max=self._of_a_side - 1)
        return side + torch.where(distance < self._single, distance, shared)

    def distance_bias(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [H, first + 2 T - 1] in x's dtype."""
        bias_NH = F.embedding(self.buckets(_distances(x_BTD, first)), self.table.weight)
        return bias_NH.to(x_BTD.dtype).t().contiguous()  # copied once here, not in each layer

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}, causal={self.causal}"


def _check_has_heads(name: str, num_heads: int | None) -> int:
    """Return `num_heads`; raise ValueError if it is None. Used by the positions with a bias per head."""
    if num_heads is None:
        raise ValueError(
            f"position {name!r} has a bias for each head, and this attention has no heads; choose an attention with "
            "num_heads, or another position"
        )
    return num_heads
