"""Residual styles: how the sublayers of a block join the stream, and where the norms are.

    x, y    [B, T, D]   B batch, T tokens, D model
    scale   [D]         one per sublayer

Each sublayer f, attention and then feedforward, joins the stream in turn:

    pre        x = x + dropout(f(norm(x)))           Xiong et al., "On layer normalization in the transformer
               architecture", 2020
    post       x = norm(x + dropout(f(x)))           Vaswani et al. 2017, section 3.1
    deepnorm   x = norm(alpha x + dropout(f(x)))     Wang et al., "DeepNet: scaling transformers to 1,000 layers", 2022,
               figure 2; alpha = (2 num_layers)^(1/4); the init scheme deepnorm scales the weights of the branches down
    sandwich   x = x + norm(dropout(f(norm(x))))     Ding et al., "CogView", 2021, section 2.4; Gemma 2
    parallel   x = x + dropout(attention(norm(x))) + dropout(feedforward(norm(x))), with one norm
               Wang, Komatsuzaki, "GPT-J-6B", 2021; Chowdhery et al., "PaLM", 2022, section 2; with a norm for each
               sublayer: Black et al., "GPT-NeoX-20B", 2022, section 2.1

A branch is the output of a sublayer. Before dropout, LayerScale and stochastic depth change it to

    branch * scale * keep[b] / (1 - rate),   keep[b] 1 or 0, drawn for each sequence

In the style sandwich they apply to the output of the second norm, which would otherwise undo them.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..ops import Shard, bias_dropout_residual, dropout
from .norm import Norm
from .option import Count, Positive, Probability, Size, checked, create
from .registry import Choice, as_choice, register

Sublayer = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """The base of the residual styles: a subclass sets its number of norms, and joins the sublayers in `forward`.

    Args:
        hidden_dim: D, the width of the model.
        norm: the norm and its options.
        num_sublayers: how many sublayers join the stream: two, or three with cross-attention.
        layer: index of the block in the model, from 0.
        num_layers: number of blocks of the model.
        dropout: probability of dropping a value of a branch before it joins the residual stream.
        layer_scale: initial value of each branch's learned scale per channel, 1e-5 for deep vision models; None for no
            scale (Touvron et al. 2021, section 2).
        stochastic_depth: probability of skipping a branch for a whole sequence in training, in the last block; it grows
            linearly from the first block to the last (Huang et al. 2016, section 3).

    Raises:
        ValueError: a number out of its range, or an unknown norm.
        TypeError: the norm is not a subclass of `Norm`.
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"norm", "num_sublayers", "layer", "num_layers", "dropout"})
    # Whether a stack of blocks in this style needs a norm after the last one.
    final_norm: ClassVar[bool]

    @checked
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
        self.norms = nn.ModuleList(_built_norm(norm, hidden_dim) for _ in range(self.num_norms(num_sublayers)))
        scales = [nn.Parameter(torch.empty(hidden_dim)) for _ in range(num_sublayers)] if layer_scale else []
        self.scales = nn.ParameterList(scales)
        self.reset_parameters()

    @staticmethod
    def num_norms(num_sublayers: int) -> int:
        """Return how many norms these sublayers need."""
        return num_sublayers

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scales to their initial value. The norms reset themselves."""
        for scale in self.scales:
            scale.fill_(self.layer_scale)

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer], *, shard: Shard | None = None) -> Tensor:
        """Return the stream after every sublayer has joined it, in order: [B, T, D] -> [B, T, D].

        Args:
            x_BTD: the stream.
            sublayers: functions of the stream.
            shard: the position of x in the whole stream, for dropout's masks; None if x is all of it.
        """
        raise NotImplementedError

    def branch(self, number: int, sublayer: Sublayer, x_BTD: Tensor) -> Tensor:
        """Return the branch of a sublayer, before dropout, in a style that does not normalise it."""
        return self.scaled(number, sublayer(x_BTD))

    def scaled(self, number: int, y_BTD: Tensor) -> Tensor:
        """Apply LayerScale and stochastic depth to the branch of a sublayer."""
        if len(self.scales):
            y_BTD = y_BTD * self.scales[number]
        if self.training and self.skipped > 0:
            # One draw per sequence, by the dropout op, whose mask is the same on every backend. In float32, since
            # bfloat16 would round 1 / (1 - rate).
            wide = torch.promote_types(y_BTD.dtype, torch.float32)
            keep_B1 = dropout(y_BTD.new_ones(y_BTD.shape[0], 1, dtype=wide), self.skipped)
            y_BTD = (y_BTD * keep_B1[..., None]).to(y_BTD.dtype)
        return y_BTD

    def norm(self, number: int) -> Norm:
        """Return the norm with this index."""
        norm = self.norms[number]
        assert isinstance(norm, Norm)
        return norm

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, layer_scale={self.layer_scale}, skipped={self.skipped}"


def _built_norm(norm: Choice | str, hidden_dim: int) -> Norm:
    built = create("norm", norm, hidden_dim)
    if not isinstance(built, Norm):
        raise TypeError(f"norm {as_choice(norm).name!r} must be a subclass of components.Norm, which joins sums")
    return built


@register("residual", "pre")
class PreResidual(Residual):
    """A norm before each sublayer, as in GPT-2 and Llama. The end of the stack needs a norm.

    >>> residual = PreResidual(2)
    >>> residual(torch.tensor([[[1.0, 3.0]]]), [torch.neg, torch.zeros_like]).detach().round(decimals=2)
    tensor([[[2., 2.]]])
    """

    final_norm: ClassVar[bool] = True

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer], *, shard: Shard | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        normed_BTD: Tensor = self.norm(0)(x_BTD)
        # A branch joins the stream in one op with the norm that follows.
        for number, sublayer in enumerate(sublayers[:-1]):
            y_BTD = self.branch(number, sublayer, normed_BTD)
            normed_BTD, x_BTD = self.norm(number + 1).add(y_BTD, x_BTD, p=self.dropout, shard=shard, style="prenorm")
        y_BTD = self.branch(len(sublayers) - 1, sublayers[-1], normed_BTD)
        return bias_dropout_residual(y_BTD, x_BTD, p=self.dropout, training=self.training, shard=shard)


@register("residual", "post")
class PostResidual(Residual):
    """A norm after each sublayer has joined the stream. Deep stacks need a warm-up of the learning rate.

    >>> residual = PostResidual(2)
    >>> residual(torch.tensor([[[1.0, 3.0]]]), [torch.zeros_like, torch.neg]).abs().max().item()
    0.0
    """

    final_norm: ClassVar[bool] = False
    alpha: float = 1.0

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer], *, shard: Shard | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        for number, sublayer in enumerate(sublayers):
            y_BTD = self.branch(number, sublayer, x_BTD)
            if self.alpha != 1.0:
                x_BTD = self.alpha * x_BTD
            x_BTD = self.norm(number).add(y_BTD, x_BTD, p=self.dropout, shard=shard, style="post")
        return x_BTD


@register("residual", "deepnorm")
class DeepNormResidual(PostResidual):
    """A norm after each sum, in which the stream is scaled up by alpha.

    Args:
        alpha: the stream's factor; None for (2 num_layers)^(1/4), the value for a single encoder or decoder.

    >>> DeepNormResidual(8, num_layers=8).alpha
    2.0
    """

    @checked
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
        alpha: Positive | None = None,
    ) -> None:
        super().__init__(
            hidden_dim,
            norm=norm,
            num_sublayers=num_sublayers,
            layer=layer,
            num_layers=num_layers,
            dropout=dropout,
            layer_scale=layer_scale,
            stochastic_depth=stochastic_depth,
        )
        self.alpha = (2 * num_layers) ** 0.25 if alpha is None else alpha

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha:.3g}"


@register("residual", "sandwich")
class SandwichResidual(Residual):
    """Norms on both sides of each sublayer, as in Gemma 2. The end of the stack needs a norm.

    >>> len(SandwichResidual(8).norms)
    4
    """

    final_norm: ClassVar[bool] = True

    @staticmethod
    def num_norms(num_sublayers: int) -> int:
        """Return two for each sublayer."""
        return 2 * num_sublayers

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer], *, shard: Shard | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        for number, sublayer in enumerate(sublayers):
            y_BTD, behind = sublayer(self.norm(2 * number)(x_BTD)), self.norm(2 * number + 1)
            if len(self.scales) or (self.training and self.skipped > 0):
                normed_BTD = behind(dropout(y_BTD, self.dropout, training=self.training, shard=shard))
                x_BTD = x_BTD + self.scaled(number, normed_BTD)
            else:
                x_BTD = behind.add(y_BTD, x_BTD, p=self.dropout, shard=shard, style="pre")
        return x_BTD


@register("residual", "parallel")
class ParallelResidual(Residual):
    """All sublayers of a block read the block's input. The end of the stack needs a norm.

    Args:
        separate_norms: whether each sublayer has its own norm, as in GPT-NeoX; in GPT-J and Phi they share one.

    >>> len(ParallelResidual(8).norms), len(ParallelResidual(8, separate_norms=True).norms)
    (1, 2)
    """

    final_norm: ClassVar[bool] = True

    @checked
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
        separate_norms: bool = False,
    ) -> None:
        super().__init__(
            hidden_dim,
            norm=norm,
            num_sublayers=num_sublayers,
            layer=layer,
            num_layers=num_layers,
            dropout=dropout,
            layer_scale=layer_scale,
            stochastic_depth=stochastic_depth,
        )
        if separate_norms:
            self.norms.extend(_built_norm(norm, hidden_dim) for _ in range(1, num_sublayers))

    @staticmethod
    def num_norms(num_sublayers: int) -> int:
        """Return 1, for the norm that all sublayers share."""
        return 1

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer], *, shard: Shard | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        given_BTD = normed_BTD = x_BTD
        for number, sublayer in enumerate(sublayers):
            if number < len(self.norms):
                normed_BTD = self.norm(number)(given_BTD)
            y_BTD = self.branch(number, sublayer, normed_BTD)
            x_BTD = bias_dropout_residual(y_BTD, x_BTD, p=self.dropout, training=self.training, shard=shard)
        return x_BTD
