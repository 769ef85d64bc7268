"""What pre-norm and post-norm blocks have in common: their parts.

x, y   [B, T, D]   B batch, T tokens, D model
"""

from typing import ClassVar

from torch import nn

from ...ops import check_probability
from ..norm import Norm
from ..registry import Choice, accepted, create

__all__ = ["Block"]


class Block(nn.Module):
    """The base of the blocks: an attention, a feedforward and a norm for each of the two.

    Args:
        hidden_dim: D, the width of the model.
        attention: the attention and its options.
        feedforward: the feedforward and its options.
        norm: the norm and its options.
        dropout: probability of dropping a value of a sublayer's output before it joins the residual stream.
        causal: whether a token looks only at itself and the tokens before it.
        backend: what the fused layers among the parts get as their backend; None leaves them unfused.
        partition: how they choose what is saved for backward.
    """

    built_in: ClassVar[frozenset[str]] = frozenset(
        {"attention", "feedforward", "norm", "dropout", "causal", "backend", "partition"}
    )
    # Whether a stack of such blocks needs a norm after the last one.
    final_norm: ClassVar[bool]

    def __init__(
        self,
        hidden_dim: int,
        *,
        attention: Choice | str,
        feedforward: Choice | str = "mlp",
        norm: Choice | str = "layer_norm",
        dropout: float = 0.0,
        causal: bool = True,
        backend: str | None = None,
        partition: str = "min_cut",
    ) -> None:
        super().__init__()
        check_probability(dropout)
        self.dropout = dropout
        fusion = {"backend": backend, "partition": partition}
        attention_fusion = accepted("attention", attention, **fusion)
        feedforward_fusion = accepted("feedforward", feedforward, **fusion)
        self.norm1: Norm = create("norm", norm, hidden_dim)
        self.attention: nn.Module = create("attention", attention, hidden_dim, causal=causal, **attention_fusion)
        self.norm2: Norm = create("norm", norm, hidden_dim)
        self.feedforward: nn.Module = create("feedforward", feedforward, hidden_dim, **feedforward_fusion)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"
