"""The base of the residual styles: norms, LayerScale and stochastic depth.

x, y    [B, T, D]   B batch, T tokens, D model
scale   [D]         one per sublayer

A branch is the output of a sublayer; before dropout it becomes  branch * scale * kept[b] / (1 - rate). In a style that
normalises branches, that applies to the output of the norm.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...ops import dropout
from ..norm import Norm
from ..ranges import Count, Positive, Probability, Size, in_range
from ..registry import Choice, as_choice, create

__all__ = ["Residual", "Sublayer"]

Sublayer = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """The base of the residual styles: a subclass says how many norms it needs, and joins the sublayers in `forward`.

    Args:
        hidden_dim: D, the width of the model.
        norm: the norm and its options.
        num_sublayers: how many sublayers join the stream: two, or three with cross-attention.
        layer: which block of the model this is, from 0.
        num_layers: number of blocks of the model.
        dropout: probability of dropping a value of a branch before it joins the residual stream.
        layer_scale: initial value of each branch's learned scale per channel, 1e-5 for deep vision models; None for no
            scale (Touvron et al. 2021, section 2).
        stochastic_depth: probability of leaving a branch out for a whole sequence in training, in the last block; it
            grows linearly from the first block to the last (Huang et al. 2016, section 3).

    Raises:
        ValueError: a number out of its range, or an unknown norm.
        TypeError: the norm is no subclass of `Norm`.
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"norm", "num_sublayers", "layer", "num_layers", "dropout"})
    # Whether a stack of blocks in this style needs a norm after the last one.
    final_norm: ClassVar[bool]

    @in_range
    def __init__(
        self,
        hidden_dim: Size,
        *,
        norm: Choice | str = "layer_norm",
        num_sublayers: Size = 2,
        layer: Count = 0,
        num_layers: Size = 1,
        dropout: Probability = 0.0,
        layer_scale: Positive | None = None,
        stochastic_depth: Probability = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.layer_scale = layer_scale
        self.skipped = stochastic_depth * (layer + 1) / num_layers
        norms = [create("norm", norm, hidden_dim) for _ in range(self.num_norms(num_sublayers))]
        for built in norms:
            if not isinstance(built, Norm):
                raise TypeError(
                    f"norm {as_choice(norm).name!r} must be a subclass of components.Norm, which joins sums"
                )
        self.norms = nn.ModuleList(norms)
        scales = [nn.Parameter(torch.empty(hidden_dim)) for _ in range(num_sublayers)] if layer_scale else []
        self.scales = nn.ParameterList(scales)
        self.reset_parameters()

    @staticmethod
    def num_norms(num_sublayers: int) -> int:
        """Return how many norms so many sublayers need."""
        return num_sublayers

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scales to their initial value. The norms reset themselves."""
        for scale in self.scales:
            scale.fill_(self.layer_scale)

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """Return the stream with every sublayer joined, in their order: [B, T, D] -> [B, T, D]."""
        raise NotImplementedError

    def branch(self, number: int, sublayer: Sublayer, x_BTD: Tensor) -> Tensor:
        """Return the branch of a sublayer, before dropout, in a style that does not normalise it."""
        return self.scaled(number, sublayer(x_BTD))

    def scaled(self, number: int, y_BTD: Tensor) -> Tensor:
        """Apply LayerScale and stochastic depth to the branch of a sublayer."""
        if len(self.scales):
            y_BTD = y_BTD * self.scales[number]
        if self.training and self.skipped > 0:
            # One draw per sequence, by the op with the same mask on every backend; in float32, since bfloat16 would
            # round 1 / (1 - rate).
            wide = torch.promote_types(y_BTD.dtype, torch.float32)
            kept_B1 = dropout(y_BTD.new_ones(y_BTD.shape[0], 1, dtype=wide), self.skipped)
            y_BTD = (y_BTD * kept_B1[..., None]).to(y_BTD.dtype)
        return y_BTD

    def norm(self, number: int) -> Norm:
        """Return the norm of that number."""
        norm = self.norms[number]
        assert isinstance(norm, Norm)
        return norm

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, layer_scale={self.layer_scale}, skipped={self.skipped}"
