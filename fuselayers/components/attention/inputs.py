"""The inputs of an attention besides x, and the attentions that take them.

    x               [B, T, D]        B batch, T tokens, D model
    q               [B, H, T, C]     H query heads, C channels of a head
    k               [B, G, S, C]     G key heads, S keys
    distance_bias   [H, T + S - 1]   added to the scores before the softmax: entry s - t + T - 1 for query t and key s

The signature of an attention's `forward(x, *, ...)` lists the inputs that it supports.
"""

import inspect
from collections.abc import Callable
from typing import Final

from torch import Tensor

from ..registry import Choice, as_choice, get, is_shipped, names

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# An argument of `forward` (causal: of `__init__`) -> the ability that it stands for, in words for errors.
ABILITIES: Final = {
    "causal": "hide the tokens that follow",
    "rotate": "rotate its queries and keys",
    "distance_bias": "add a bias of distances to its scores",
    "key_padding_mask": "leave padding out",
    "mask": "take a mask",
    "documents": "keep the documents of a row apart",
    "cache": "keep keys and values for generation",
    "memory": "attend to another sequence",
}


def takes(forward: Callable[..., object]) -> frozenset[str]:
    """Return the inputs that a `forward` takes, according to its signature.

    >>> sorted(takes(lambda x, *, rotate=None, mask=None: x))
    ['mask', 'rotate']
    """
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return frozenset(ABILITIES)
    return frozenset(ABILITIES).intersection(parameters)


def is_able(name: str, ability: str) -> bool:
    """Return whether the registered attention of that name has an ability of `ABILITIES`.

    >>> is_able("multi_head", "causal")
    True
    """
    component = get("attention", name)
    if ability == "causal":
        return "causal" in inspect.signature(component).parameters
    return ability in takes(component.forward)  # type: ignore[attr-defined]


def check_able(attention: Choice | str, ability: str, *, wanted_by: str) -> None:
    """Raise ValueError unless the chosen attention has an ability.

    Args:
        attention: the choice.
        ability: one of `ABILITIES`.
        wanted_by: the component that needs it, for the error text, such as "position 'rotary'".
    """
    name = as_choice(attention).name
    if not is_able(name, ability):
        able = [other for other in names("attention") if is_able(other, ability)]
        component = get("attention", name)
        method = "__init__" if ability == "causal" else "forward"
        advice = (
            "" if is_shipped(component) else f"; if {component.__qualname__} can, its {method} must take {ability!r}"
        )
        raise ValueError(
            f"attention {name!r} cannot {ABILITIES[ability]}, which {wanted_by} needs; "
            f"those that can: {', '.join(able)}{advice}"
        )
