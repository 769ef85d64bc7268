"""Other components for some blocks of a stack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..registry import Choice

# The parts that a `LayerChange` may change.
PARTS: Final = ("attention", "feedforward", "norm", "residual", "block")


@dataclass(frozen=True)
class LayerChange:
    """Other components for some layers. At least one component is required.

    Args:
        at: the layers, as an index or a slice of a Python list: "0", "-1", "1::2" (every second), ":3" (the first
            three).
        attention: their attention, or None for that of the other layers.
        feedforward: their feedforward, or None.
        norm: their norm, or None; the norm at the end of a stack does not change.
        residual: their residual style, or None.
        block: their block, or None.

    Raises:
        TypeError: `at` is not a string.
        ValueError: it changes no component.

    >>> LayerChange("1::2", feedforward="mlp").at
    '1::2'
    """

    at: str
    attention: Choice | str | None = None
    feedforward: Choice | str | None = None
    norm: Choice | str | None = None
    residual: Choice | str | None = None
    block: Choice | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.at, str):
            raise TypeError(f'layers.at must be text, an index or a slice such as "0", "1::2" or ":3", got {self.at!r}')
        if all(getattr(self, part) is None for part in PARTS):
            raise ValueError(f"layers.at {self.at!r} changes nothing; name a component, one of {', '.join(PARTS)}")


def matching_layers(at: str, num_layers: int) -> range:
    """Return the layers that `at` names.

    Raises:
        ValueError: it is neither an index nor a slice, or names no layer.

    >>> list(matching_layers("1::2", 6)), list(matching_layers("-1", 6))
    ([1, 3, 5], [5])
    """
    layers = range(num_layers)
    try:
        numbers = [int(part) if part.strip() else None for part in at.split(":")]
        if len(numbers) == 1 and numbers[0] is not None:
            matching = (
                layers[numbers[0] : numbers[0] + 1 or None] if -num_layers <= numbers[0] < num_layers else range(0)
            )
        elif len(numbers) in (2, 3):
            matching = layers[slice(*numbers)]
        else:
            raise ValueError(at)
    except ValueError:
        raise ValueError(f'layers.at must be an index or a slice such as "0", "1::2" or ":3", got {at!r}') from None
    if not matching:
        raise ValueError(f"layers.at {at!r} names none of the {num_layers} layers, 0 to {num_layers - 1}")
    return matching


def changed_parts(
    parts: Mapping[str, Choice | str], changes: Sequence[LayerChange], *, num_layers: int
) -> list[dict[str, Choice | str]]:
    """Return the components of each layer; later changes of a layer's component override earlier ones.

    Args:
        parts: the components of every layer: kind -> choice.
        changes: the changes for some layers.
        num_layers: the number of layers.

    Raises:
        ValueError: as `matching_layers`.
    """
    layers = [dict(parts) for _ in range(num_layers)]
    for change in changes:
        for layer in matching_layers(change.at, num_layers):
            for part in PARTS:
                choice = getattr(change, part)
                if choice is not None:
                    layers[layer][part] = choice
    return layers
