"""side_effects -- what a run of a traced graph does besides computing: which inputs it overwrites, whether it draws.

Found by a run on fake tensors, which takes no memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .torch_private import FakeTensorMode, TorchDispatchMode

__all__ = ["SideEffects", "side_effects"]


@dataclass(frozen=True)
class SideEffects:
    """What a graph does besides computing.

    Attributes:
        overwritten: the positions of the inputs that it writes to.
        draws: whether it takes random numbers from torch's generators; a single one, such as a seed, does not count.
    """

    overwritten: frozenset[int]
    draws: bool


def side_effects(graph: Callable[..., Any], inputs: Sequence[Any]) -> SideEffects:
    """Run a traced graph on fake twins of its inputs, and return what it did to them.

    Raises:
        RuntimeError: or what else a graph raises that needs values, which fake tensors do not have.

    >>> def fill(x, y):
    ...     return x.add_(torch.rand_like(y))
    >>> side_effects(fill, [torch.ones(2), torch.ones(2)])
    SideEffects(overwritten=frozenset({0}), draws=True)
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watcher = _Watcher()
    with torch.no_grad(), mode, watcher:
        twins = [mode.from_tensor(one.detach()).clone() if isinstance(one, Tensor) else one for one in inputs]
        before = [_version(twin) for twin in twins]
        graph(*twins)
    changed = {place for place, twin in enumerate(twins) if _version(twin) != before[place]}
    changed |= {place for place, twin in enumerate(twins) if _storage(twin) in watcher.statistics}
    return SideEffects(frozenset(changed), watcher.draws)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for random ops that give more than one number, and for statistics that an op updates.

    Batch norm writes to its running statistics, and neither its schema nor a tensor's version says so.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.statistics: set[int | None] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | (kwargs or {})
        # Attention counts as random, whether it drops something or not.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0:
            results = result if isinstance(result, tuple | list) else (result,)
            self.draws |= any(isinstance(one, Tensor) and one.numel() > 1 for one in results)
        for name in ("running_mean", "running_var"):
            if isinstance(given.get(name), Tensor):
                self.statistics.add(_storage(given[name]))
        return result


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
