"""carry -- one model's weights into another one, by name, and an account of what did not carry.

Weights are what a state_dict holds: parameters and persistent buffers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..partition import FusedModule

__all__ = ["Carried", "carry_weights", "compare_weights"]

_Lines = list[tuple[tuple[str, ...], str]]


@dataclass(frozen=True)
class Carried:
    """Which weights one model has from another. Its text says what did not carry, equal submodules in one line.

    Args:
        carried: the weights that agree.
        new: those of the target that have none to agree with in the source.
        reshaped: those that have one of another shape: name -> shape in the source, shape in the target.
        left: those of the source that have no place in the target.

    >>> print(Carried(carried=("norm.weight",), left=("norm.bias",)))
    1 of 1 weights carried over; what did not:
      norm.bias left behind
    """

    carried: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the target has all its weights from the source, and none was left behind."""
        return not (self.new or self.reshaped or self.left)

    def __str__(self) -> str:
        count = len(self.carried) + len(self.new) + len(self.reshaped)
        if self.complete:
            return f"all {count} weights carried over"
        lines = [
            f"  {'.'.join(submodule)}: {text}" if submodule else f"  {text}"
            for submodule, text in _grouped(self._lines())
        ]
        return "\n".join([f"{len(self.carried)} of {count} weights carried over; what did not:", *lines])

    def _lines(self) -> _Lines:
        """A line per submodule that has, or had, a weight that did not carry."""
        fates: dict[tuple[str, ...], dict[str, list[str]]] = {}
        told = [(name, "new") for name in self.new]
        told += [(name, f"was {list(was)}, is {list(now)}") for name, (was, now) in self.reshaped.items()]
        told += [(name, "left behind") for name in self.left]
        for name, fate in told:
            # A weight is told with the layer that holds it, "gate.weight", under the submodule that holds the layer.
            *submodule, layer, weight = ("", "", *name.split("."))
            of_submodule = fates.setdefault(tuple(filter(None, submodule)), {})
            of_submodule.setdefault(fate, []).append(f"{layer}.{weight}".lstrip("."))
        return [
            (submodule, "; ".join(f"{', '.join(names)} {fate}" for fate, names in of_submodule.items()))
            for submodule, of_submodule in fates.items()
        ]


def carry_weights(source: nn.Module, target: nn.Module) -> Carried:
    """Copy the weights that agree from `source` to `target`, and say what did not carry.

    Weights agree that have the same name and shape. In a submodule that is of another class in the target, all names
    have to be the same: an mlp's `up` means something else beside the `gate` of a gated one. A single layer, as a norm,
    gives what it has. What a layer makes of its weights, as attention of another number of heads, is not looked at.

    A module whose weights are other quantities than their names say has an attribute `weights_mean`, a word or two for
    what they are: an RMS norm's with a unit offset are no scales, but the scales' differences from one. None of its
    weights agrees with one of a module that has another `weights_mean`, or none.

    What does not carry stays as it is in the target. The values are copied, to the target's dtype and device: neither
    model sees the other one's later changes. Where the target uses one weight under several names and the source has
    several, the first name's is carried.

    Args:
        source: any module.
        target: any module; it is changed in place.

    Raises:
        ValueError: a weight that would carry is on the meta device in one of the two models only.

    >>> source, target = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
    >>> carried = carry_weights(source, target)
    >>> carried.left, torch.equal(source.weight, target.weight)
    (('bias',), True)
    """
    carried = compare_weights(source, target)
    before, after = _weights_of(source), _weights_of(target)
    for name in carried.carried:
        if before[name].is_meta != after[name].is_meta:
            empty, advice = ("source", "load its weights") if before[name].is_meta else ("target", "call its to_empty")
            raise ValueError(f"{name} of the {empty} is on the meta device, where there are no values; {advice} first")
    with torch.no_grad():
        for name in carried.carried:
            after[name].copy_(before[name])
    return carried


def compare_weights(source: nn.Module, target: nn.Module) -> Carried:
    """Return what `carry_weights` would carry, and change nothing. Models on the meta device will do.

    >>> print(compare_weights(nn.Linear(2, 3), nn.Linear(2, 4)))
    0 of 2 weights carried over; what did not:
      weight was [3, 2], is [4, 2]; bias was [3], is [4]
    """
    before, after = _weights_of(source), _weights_of(target)
    apart = _disagreeing(source, target, before, after)
    known = {name: weight for name, weight in before.items() if name in after and not name.startswith(apart)}
    left = [name for name in before if name not in known]
    carried: list[str] = []
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    # Note: [tied weights] The target's one weight cannot hold two of the source; it keeps the first.
    filled: dict[int, Tensor] = {}
    for name, weight in known.items():
        if weight.shape != after[name].shape:
            reshaped[name] = tuple(weight.shape), tuple(after[name].shape)
        elif filled.setdefault(id(after[name]), weight) is weight:
            carried.append(name)
        else:
            left.append(name)
    new = (name for name in after if name not in known)
    return Carried(carried=tuple(carried), new=tuple(new), reshaped=reshaped, left=tuple(left))


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> parameter or persistent buffer, the very tensors; a tied one stands under each of its names."""
    state = model.state_dict(keep_vars=True)
    # Modules may put values that are no tensors into a state_dict.
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _disagreeing(source: nn.Module, target: nn.Module, before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """Return the beginnings of the names of weights that may have the same name and still mean something else."""
    theirs = dict(source.named_modules(remove_duplicate=False))
    apart: list[str] = []
    for name, module in target.named_modules(remove_duplicate=False):
        other = theirs.get(name, module)
        start = f"{name}." if name else ""
        if _meaning_of(module) != _meaning_of(other):
            apart.append(start)
            continue
        is_layer = not (list(module.children()) or list(other.children()))
        if is_layer or type(_shown(module)) is type(_shown(other)):
            continue
        if {one for one in before if one.startswith(start)} != {one for one in after if one.startswith(start)}:
            apart.append(start)
    return tuple(apart)


def _meaning_of(module: nn.Module) -> str | None:
    meaning: str | None = getattr(_shown(module), "weights_mean", None)
    return meaning


def _shown(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, FusedModule) else module


def _grouped(lines: _Lines) -> _Lines:
    """Put lines together that say the same of submodules which differ in a number: blocks.0-11.feedforward."""
    for place in reversed(range(max(len(submodule) for submodule, _ in lines))):
        numbers: dict[tuple[tuple[str, ...], tuple[str, ...] | None, str], list[int]] = {}
        for submodule, text in lines:
            if place < len(submodule) and submodule[place].isdecimal():
                alike = numbers.setdefault((submodule[:place], submodule[place + 1 :], text), [])
                alike.append(int(submodule[place]))
            else:
                numbers[submodule, None, text] = []
        lines = [
            (above if below is None else (*above, _ranges(found), *below), text)
            for (above, below, text), found in numbers.items()
        ]
    return lines


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, those in a row as a range.

    >>> _ranges([0, 1, 2, 5])
    '0-2,5'
    """
    rows: list[list[int]] = []
    for number in sorted(numbers):
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return ",".join(str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows)
