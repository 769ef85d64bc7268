"""transformer -- attention and a feedforward, joined to the stream in one of the residual styles.

    x, y     [B, T, D]   B batch, T tokens, D model
    memory   [B, S, D]   the input of cross-attention, S tokens

With the style "pre":

    x = x + dropout(attention(norm(x)))
    x = x + dropout(cross_attention(norm(x), memory))     (only with cross_attention)
    y = x + dropout(feedforward(norm(x)))

Vaswani et al. 2017, section 3.1.
"""

import functools
from typing import Any, ClassVar

from torch import Tensor, nn

from ...ops import Shard
from ..attention.inputs import check_able, takes
from ..layout import WHOLE, Layout
from ..option import Count, Probability, Size, accepted, checked, create
from ..registry import Choice, as_choice, check_base, register, title
from ..residual import Residual, Sublayer


@register("block", "transformer")
class TransformerBlock(nn.Module):
    """Self-attention, cross-attention if chosen, and a feedforward.

    The arguments of `Model` that apply to a single block, and:

    Args:
        cross_attention: the attention to the memory, or None for a block without one.
        dropout: probability of dropping a value of a sublayer's output before it joins the residual stream.
        causal: whether a token looks only at itself and the tokens before it.
        layer: index of the block in the model, from 0.
        num_layers: number of blocks of the model.
        context_length: longest sequence in tokens; None where no component of the block needs it.

    Raises:
        ValueError: an unknown name or option; sizes that do not fit; a causal block whose attention cannot be causal; a
            cross_attention whose kind or options exclude a memory; no context_length for an attention that needs it; or
            (in forward) an input that the attention cannot use.
        TypeError: the residual style is not a subclass of `Residual`.

    >>> import torch
    >>> block = TransformerBlock(8, attention=Choice("multi_head", {"num_heads": 2}), feedforward="fused_mlp")
    >>> block(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    layout: Layout = WHOLE
    built_in: ClassVar[frozenset[str]] = frozenset(
        {
            "attention",
            "feedforward",
            "norm",
            "residual",
            "cross_attention",
            "dropout",
            "causal",
            "layer",
            "num_layers",
            "context_length",
            "backend",
            "partition",
        }
    )

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        attention: Choice | str,
        feedforward: Choice | str = "mlp",
        norm: Choice | str = "layer_norm",
        residual: Choice | str = "pre",
        cross_attention: Choice | str | None = None,
        dropout: Probability = 0.0,
        causal: bool = False,
        layer: Count = 0,
        num_layers: Size = 1,
        context_length: Size | None = None,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        super().__init__()
        if causal:
            check_able(attention, "causal", wanted_by="a causal model")
        offered: dict[str, Any] = {"backend": backend, "partition": partition, "causal": causal}
        if context_length is not None:
            offered["context_length"] = context_length
        elif accepted("attention", attention, context_length=None):
            raise ValueError(
                f"attention {as_choice(attention).name!r} needs the longest sequence in tokens; pass context_length to "
                "the block"
            )
        self.attention: nn.Module = create(
            "attention", attention, hidden_dim, **accepted("attention", attention, **offered)
        )
        self.cross_attention: nn.Module | None = None
        self.takes_of_memory: frozenset[str] = frozenset()
        if cross_attention is not None:
            self.cross_attention = _built_cross_attention(cross_attention, hidden_dim, offered)
            self.takes_of_memory = takes(self.cross_attention.forward)
        self.feedforward: nn.Module = create(
            "feedforward", feedforward, hidden_dim, **accepted("feedforward", feedforward, **offered)
        )
        check_base("residual", residual, Residual)
        self.residual: Residual = create(
            "residual",
            residual,
            hidden_dim,
            norm=norm,
            num_sublayers=2 if cross_attention is None else 3,
            layer=layer,
            num_layers=num_layers,
            dropout=dropout,
        )
        self.takes = takes(self.attention.forward)
        self.check_parts()

    def check_parts(self) -> None:
        """Raise ValueError for a component that this kind of block does not support. Subclasses override it."""

    @property
    def final_norm(self) -> bool:
        """Whether a stack of such blocks needs a norm after the last one."""
        return self.residual.final_norm

    def forward(
        self,
        x_BTD: Tensor,
        *,
        memory: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        shard: Shard | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return the stream after this block: [B, T, D] -> [B, T, D].

        Args:
            x_BTD: the stream.
            memory: [B, S, D], the input of the cross-attention; required by blocks that have one.
            memory_padding_mask: bool [B, S], True for a real token of the memory; None if all are real.
            shard: the position of x in the whole stream, if `parallelize` divides its tokens.
            inputs: of the attention: rotate, distance_bias, key_padding_mask, mask, documents, cache; those that are
                None are left out. A feedforward with `takes_padding` also gets the key_padding_mask, with a cache only
                the part for the new tokens.

        Raises:
            ValueError: an attention cannot use an input, or there is a memory without a cross-attention, or the
                reverse.
        """
        sublayers = self.sublayers(memory=memory, memory_padding_mask=memory_padding_mask, **inputs)
        sublayers = [self.layout.around(sublayer, shard) for sublayer in sublayers]
        # A user's residual style need not accept a shard; `parallelize` rejects such a style.
        divided = {} if shard is None else {"shard": shard}
        y_BTD: Tensor = self.residual(x_BTD, sublayers, **divided)
        return y_BTD

    def sublayers(
        self, *, memory: Tensor | None = None, memory_padding_mask: Tensor | None = None, **inputs: Any
    ) -> list[Sublayer]:
        """Return attention, cross-attention if there is one, and feedforward as functions of the stream alone.

        Args and Raises: as `forward`.
        """
        inputs = {name: value for name, value in inputs.items() if value is not None}
        if not self.takes.issuperset(inputs):
            unusable = sorted(inputs.keys() - self.takes)
            raise ValueError(
                f"{title(self.attention)} cannot use {', '.join(unusable)}; it takes {', '.join(sorted(self.takes))}"
            )
        feedforward: Sublayer = self.feedforward
        if "key_padding_mask" in inputs and getattr(feedforward, "takes_padding", False):
            feedforward = functools.partial(_with_padding, self.feedforward, inputs["key_padding_mask"])
        sublayers: list[Sublayer] = [functools.partial(self.attention, **inputs), feedforward]
        if (memory is None) != (self.cross_attention is None):
            raise ValueError(
                "this block has no cross_attention, so it takes no memory; leave it out"
                if self.cross_attention is None
                else "this block has a cross_attention, which needs a memory; pass memory="
            )
        if self.cross_attention is not None:
            look = functools.partial(self.cross_attention, memory=memory)
            if memory_padding_mask is not None:
                if "key_padding_mask" not in self.takes_of_memory:
                    raise ValueError(f"{title(self.cross_attention)} cannot use memory_padding_mask; leave it out")
                look = functools.partial(look, key_padding_mask=memory_padding_mask)
            if "cache" in inputs and "cache" in self.takes_of_memory:
                look = functools.partial(look, cache=inputs["cache"].of_memory)
            sublayers.insert(1, look)
        return sublayers


def _built_cross_attention(choice: Choice | str, hidden_dim: int, offered: dict[str, Any]) -> nn.Module:
    """Build the attention to a memory; `offered` holds the arguments that the block fills in."""
    check_able(choice, "memory", wanted_by="a block with cross_attention")
    of_memory = accepted("attention", choice, **{**offered, "causal": False})
    built: nn.Module = create("attention", choice, hidden_dim, **of_memory)
    try:
        getattr(built, "check_memory", lambda: None)()
    except ValueError as error:
        name = as_choice(choice).name
        raise ValueError(f"cross_attention {name!r} (by default the choice of attention): {error}") from None
    if offered["causal"] and getattr(built, "mixes_queries", False):
        raise ValueError(
            f"cross_attention {as_choice(choice).name!r} mixes the queries of all tokens, so a later token would "
            "change an earlier one; use another cross_attention, such as 'multi_head'"
        )
    return built


def _with_padding(feedforward: nn.Module, key_padding_mask: Tensor, x_BTD: Tensor) -> Tensor:
    # With a cache the mask covers all keys; those of x are the last.
    before = key_padding_mask.shape[1] - x_BTD.shape[1]
    y_BTD: Tensor = feedforward(x_BTD, key_padding_mask=key_padding_mask[:, before:])
    return y_BTD
