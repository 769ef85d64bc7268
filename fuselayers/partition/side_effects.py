"""side_effects -- what a graph does besides computing. Used by auto.

It may overwrite inputs, draw random numbers, switch gradients or autocast, and hold checkpoints. A run on fake tensors,
which takes no memory, shows the writes: each op's schema names the arguments that the op writes to. A write through a
view, or through `.data`, counts by its storage.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from .._torch.dispatch import FakeTensorMode, TorchDispatchMode, pytree
from .._torch.tracing import SWITCHES_OF_MODES, all_nodes
from .passes import SEED_OP

_AUTOCAST: Final = ("cpu", "cuda")


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
        copies = [mode.from_tensor(one.detach()).clone() if isinstance(one, Tensor) else one for one in inputs]
        watcher.written.clear()  # making them wrote to them
        graph(*copies)
    changed = (
        index for index, one in enumerate(copies) if isinstance(one, Tensor) and _storage(one) in watcher.written
    )
    return SideEffects(frozenset(changed), watcher.draws)


def sharing_memory(inputs: Sequence[Any]) -> frozenset[int]:
    """Return the positions of the tensors that share their storage with another one.

    >>> x = torch.ones(3)
    >>> sorted(sharing_memory([x, torch.ones(3), 2, x[:2]]))
    [0, 3]
    """
    tensors = {index: one for index, one in enumerate(inputs) if isinstance(one, Tensor)}
    storages = {index: _storage(one) for index, one in tensors.items() if one.layout is torch.strided}
    counts = Counter(storages.values())
    return frozenset(index for index, storage in storages.items() if counts[storage] > 1)


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
            self.draws |= not numbers and func is not SEED_OP
        return result


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


class Modes:
    """The present gradient mode and autocast, to be restored.

    A graph of Dynamo's switches them by calls. An error between two of these calls leaves them switched.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]
        self._cache = torch.is_autocast_cache_enabled()
        self._depth = _autocast_depth()

    def restore(self) -> None:
        """Restore them. Autocast drops the weights that it cast where its outermost `with` ends."""
        torch.set_grad_enabled(self._grad)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        while _autocast_depth() > self._depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def switches_modes(graph_module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's switches what `Modes` restores."""
    return any(node.target in SWITCHES_OF_MODES for node in all_nodes(graph_module))


def holds_checkpoints(graph_module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's holds `torch.utils.checkpoint`, which running the graph ignores."""
    op = torch.ops.higher_order.tag_activation_checkpoint
    return any(node.target is op for node in all_nodes(graph_module))
