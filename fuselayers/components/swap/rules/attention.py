"""Attention that drops weights on a CPU and saves a seed in place of them."""

from typing import Any, Final

from torch import nn

from ..layer import own_forward
from ..rule import Rule
from ..seeded_attention import SeededDropout, drops

NAME: Final = "attention_dropout"


def attention_dropout(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, in which `F.scaled_dot_product_attention` saves q, k, v and a seed."""
    # Without gradients too: reentrant checkpointing runs forward that way, and backward must drop the same weights.
    with SeededDropout():
        return own_forward(self, *args, **kwargs)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module's class is named an attention, it drops weights, and it contains no other attention."""
    inside = [child for child in module.modules() if "Attention" in type(child).__name__]
    return inside == [module] and drops(module) and not type(module).__module__.startswith("torch.")


RULES: Final[tuple[Rule, ...]] = (Rule(NAME, of=nn.Module, forward=attention_dropout, fits=_is_attention),)
