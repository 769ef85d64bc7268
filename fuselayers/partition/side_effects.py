"""side_effects -- what a run of a traced graph does besides computing: which inputs it overwrites, whether it draws.

Found by a run on fake tensors, which takes no memory, from what each op's schema says that it writes to. A write
through a view, or through `.data`, is one to the same storage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import FakeTensorMode, TorchDispatchMode, pytree
from .passes import seed_ops

__all__ = ["SideEffects", "side_effects"]


@dataclass(frozen=True)
class SideEffects:
    """What a graph does besides computing.

    Attributes:
        overwritten: the positions of the inputs that it writes to.
        draws: whether it takes random numbers from torch's generators, other than this library's seeds.
    """

    overwritten: frozenset[int]
    draws: bool


def side_effects(graph: Callable[..., Any], inputs: Sequence[Any]) -> SideEffects:
    """Run a traced graph on fake twins of its inputs, and return what it did to them.

    Raises:
        RuntimeError: or what else a graph raises that needs values, which fake tensors do not have, or that holds an op
            of higher order.

    >>> def fill(x, y):
    ...     return x.add_(torch.rand_like(y))
    >>> side_effects(fill, [torch.ones(2), torch.ones(2)])
    SideEffects(overwritten=frozenset({0}), draws=True)
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watcher = _Watcher()
    with torch.inference_mode(False), torch.no_grad(), mode, watcher:
        twins = [mode.from_tensor(one.detach()).clone() if isinstance(one, Tensor) else one for one in inputs]
        watcher.written.clear()  # making them wrote to them
        graph(*twins)
    changed = (
        place for place, twin in enumerate(twins) if isinstance(twin, Tensor) and _storage(twin) in watcher.written
    )
    return SideEffects(frozenset(changed), watcher.draws)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gathers the storages that ops write to, and looks for random ops. An op of higher order raises."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | (kwargs or {})
        for argument in arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            # Of the running statistics that batch norm writes to, its schema is silent.
            if writes or argument.name in ("running_mean", "running_var"):
                tensors = (one for one in pytree.tree_leaves(given.get(argument.name)) if isinstance(one, Tensor))
                self.written.update(map(_storage, tensors))
        # Attention counts as random, whether it drops something or not.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0:
            # What draws a seed draws the same one for every candidate; the empty tensor is part of that.
            numbers = isinstance(result, Tensor) and result.numel() == 0
            self.draws |= not numbers and func not in seed_ops()
        return result


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
