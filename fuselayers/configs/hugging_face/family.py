"""A family maps the weights of a `transformers` model to ours.

A family is a list of `Key`s. `{}` in a name stands for the number of a layer or an expert. If several of their tensors
make one of ours (queries, keys and values), they are stacked along the first dimension in the order of the list.

The names are those of `transformers` 5.20 to 5.24, whose models hold Mixtral's experts as two tensors per layer. Files
may hold older names; for some families `transformers` still writes them. `Family.older` translates them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Key:
    """One of their tensors and its name here.

    Args:
        theirs: its name in `transformers`.
        ours: its name here.
        transposed: whether it is a matrix [in, out], as in GPT-2.
        by_head: whether its rows are queries, keys and values of the first head, then of the second, ..., as in
            GPT-NeoX, instead of the queries of all heads first.
        first_row: rows before this one are dropped, such as the first two of OPT's positions.
    """

    theirs: str
    ours: str
    transposed: bool = False
    by_head: bool = False
    first_row: int = 0


@dataclass(frozen=True)
class Family:
    """An architecture: its keys, and the tensors to skip.

    Args:
        keys: the keys, in the order in which tensors are stacked.
        repeated: a tensor of theirs -> the tensor that it must equal, unless the model has a weight for it, such as an
            untied head.
        skipped: patterns of their tensors that are not needed here.
        older: patterns of names in files and their replacements, applied in order.
    """

    keys: tuple[Key, ...]
    repeated: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    older: tuple[tuple[str, str], ...] = ()


def both(theirs: str, ours: str, *, transposed: bool = False, by_head: bool = False) -> tuple[Key, Key]:
    """Return the keys of the weight and the bias of a linear layer or a norm."""
    return (
        Key(f"{theirs}.weight", f"{ours}.weight", transposed, by_head),
        Key(f"{theirs}.bias", f"{ours}.bias", by_head=by_head),
    )


def qkv(attention: str, *names: str) -> tuple[Key, ...]:
    """Return the keys of the weights and biases of queries, keys and values."""
    return tuple(key for name in names for key in both(f"{attention}{name}", "blocks.{}.attention.qkv"))
