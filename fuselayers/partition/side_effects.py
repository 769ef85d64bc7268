"""side_effects -- which inputs a traced graph overwrites, and whether it draws random numbers. Used by auto.

A run on fake tensors, which takes no memory, shows it: each op's schema names the arguments that the op writes to. A
write through a view, or through `.data`, counts by its storage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import FakeTensorMode, TorchDispatchMode, pytree
from .passes import seed_ops


@dataclass(frozen=True)
class SideEffects:
    """The side effects of a graph.

    Attributes:
        overwritten: the positions of the inputs that it writes to.
        draws: whether it takes random numbers from torch's generators, other than this library's seeds.
    """

    overwritten: frozenset[int]
    draws: bool


def side_effects(graph: Callable[..., Any], inputs: Sequence[Any]) -> SideEffects:
    """Run a traced graph on fake tensors like its inputs, and return its side effects.

    Raises:
        RuntimeError: or another error, if the graph needs values, which fake tensors do not have, or holds a
            higher-order op.

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
        index for index, twin in enumerate(twins) if isinstance(twin, Tensor) and _storage(twin) in watcher.written
    )
    return SideEffects(frozenset(changed), watcher.draws)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the storages that ops write to, and looks for random ops. A higher-order op raises."""

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
            # Batch norm's schema does not say that it writes to the running statistics.
            if writes or argument.name in ("running_mean", "running_var"):
                tensors = (one for one in pytree.tree_leaves(given.get(argument.name)) if isinstance(one, Tensor))
                self.written.update(map(_storage, tensors))
        # Attention counts as random, whether it drops something or not.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0:
            # Every candidate draws the library's seeds in the same way; the empty tensor is part of that.
            numbers = isinstance(result, Tensor) and result.numel() == 0
            self.draws |= not numbers and func not in seed_ops()
        return result


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
