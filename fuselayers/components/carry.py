"""carry -- copies weights from one model to another by name, and reports the weights that were not copied.

Weights are the parameters and persistent buffers in a state_dict.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..partition import eager_view

_Lines = list[tuple[tuple[str, ...], str]]


@dataclass(frozen=True)
class Carried:
    """The weights that one model took from another. Its text lists the others, with equal submodules on one line.

    Args:
        carried: weights that were copied.
        new: weights of the target without a counterpart in the source.
        reshaped: weights with a counterpart of another shape: name -> shape in the source, shape in the target.
        left: weights of the source without a counterpart in the target.

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
        """Whether all weights of the target come from the source, and no weight of the source was left behind."""
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
        """Return a line per submodule with a weight that was not copied."""
        fates: dict[tuple[str, ...], dict[str, list[str]]] = {}
        entries = [(name, "new") for name in self.new]
        entries += [(name, f"was {list(was)}, is {list(now)}") for name, (was, now) in self.reshaped.items()]
        entries += [(name, "left behind") for name in self.left]
        for name, fate in entries:
            # A weight is listed with its layer, "gate.weight", under the submodule that holds the layer.
            *submodule, layer, weight = ("", "", *name.split("."))
            of_submodule = fates.setdefault(tuple(filter(None, submodule)), {})
            of_submodule.setdefault(fate, []).append(f"{layer}.{weight}".lstrip("."))
        return [
            (submodule, "; ".join(f"{', '.join(names)} {fate}" for fate, names in of_submodule.items()))
            for submodule, of_submodule in fates.items()
        ]


def carry_weights(source: nn.Module, target: nn.Module) -> Carried:
    """Copy the weights that match from `source` to `target`, and report the others.

    Weights match if they have the same name and shape. If two submodules have different classes, all names of their
    weights must be the same: the `up` of a gated MLP is not the `up` of an MLP. This does not apply to single layers,
    such as norms. Other options of a layer, such as the number of heads, are not compared.

    A module has an attribute `weights_mean` if its weights are not the quantities that their names suggest: an RMS norm
    with a unit offset stores the scales minus one. Its weights match only those of a module with the same
    `weights_mean`.

    Other weights of the target do not change. Values are copied to the target's dtype and device, so later changes to
    one model do not affect the other. If the target uses one weight under several names and the source has several
    weights, the weight of the first name is copied.

    Args:
        source: any module.
        target: any module; it is changed in place.

    Raises:
        ValueError: a matching weight is on the meta device in one of the two models only.

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
    """Return the report of `carry_weights` without copying. Models may be on the meta device.

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
    # Note: [tied weights] One weight of the target cannot hold two of the source; it takes the first.
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
    """Return name -> parameter or persistent buffer, not copied; a tied weight appears under each of its names."""
    state = model.state_dict(keep_vars=True)
    # A state_dict may hold values that are not tensors.
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _disagreeing(source: nn.Module, target: nn.Module, before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of submodules whose weights may have equal names and different meanings."""
    theirs = dict(source.named_modules(remove_duplicate=False))
    apart: list[str] = []
    for name, module in target.named_modules(remove_duplicate=False):
        other = theirs.get(name, module)
        start = f"{name}." if name else ""
        if getattr(module, "weights_mean", None) != getattr(other, "weights_mean", None):
            apart.append(start)
            continue
        is_layer = not (list(module.children()) or list(other.children()))
        if is_layer or type(eager_view(module)) is type(eager_view(other)):
            continue
        if {key for key in before if key.startswith(start)} != {key for key in after if key.startswith(start)}:
            apart.append(start)
    return tuple(apart)


def _grouped(lines: _Lines) -> _Lines:
    """Merge equal lines of submodules whose names differ in a number: blocks.0-11.feedforward."""
    for index in reversed(range(max(len(submodule) for submodule, _ in lines))):
        numbers: dict[tuple[tuple[str, ...], tuple[str, ...] | None, str], list[int]] = {}
        for submodule, text in lines:
            if index < len(submodule) and submodule[index].isdecimal():
                key = submodule[:index], submodule[index + 1 :], text
                numbers.setdefault(key, []).append(int(submodule[index]))
            else:
                numbers[submodule, None, text] = []
        lines = [
            (above if below is None else (*above, _ranges(places), *below), text)
            for (above, below, text), places in numbers.items()
        ]
    return lines


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, with consecutive numbers as a range.

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
