"""Regions at run time, and the bounded cache of definitions that all graphs share."""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx

from ...._torch.tracing import boxed
from ....errors import say_once
from .availability import load_nvfuser
from .translate import Layout, layout_of, order_of, text_of, translate

CACHE_SIZE: Final = 1024
"""The number of cached definitions. A step of a transformer needs about twenty for each layout of its inputs, whatever
its depth."""

_Key = tuple[str, Layout]

# Of each definition, and the lock of whoever executes it: nvFuser's first execution changes a definition, in several
# steps, and backward runs in a thread of autograd.
_definitions: dict[_Key, tuple[Any, threading.Lock]] = {}
_lock: Final = threading.Lock()


def definition_for(text: str, graph: fx.Graph, layout: Layout) -> tuple[Any, threading.Lock]:
    """Return the definition of a region, whose text is `text`, for a layout of its inputs; and its lock."""
    key = (text, layout)
    with _lock:
        if key not in _definitions:
            made = _define(graph, layout)
            if len(_definitions) >= CACHE_SIZE:
                _definitions.clear()
            _definitions[key] = made, threading.Lock()
        return _definitions[key]


def _define(graph: fx.Graph, layout: Layout) -> Any:
    module = load_nvfuser()
    with module.FusionDefinition() as definition:
        translate(graph, layout, definition, module)
    return definition


class _Result:
    """The dtype, the sizes and the layout of a region's result, as traced. A symbolic size is None."""

    def __init__(self, value: torch.Tensor) -> None:
        self.dtype, self.order = value.dtype, order_of(value)
        self.shape = [size if isinstance(size, int) else None for size in value.shape]

    def check(self, value: torch.Tensor) -> None:
        """Raise RuntimeError for another dtype or other sizes."""
        fits = value.dtype == self.dtype and value.dim() == len(self.shape)
        if not fits or any(size not in (None, came) for size, came in zip(self.shape, value.shape, strict=True)):
            shape = ", ".join("any" if size is None else str(size) for size in self.shape)
            raise RuntimeError(f"wanted {self.dtype} [{shape}] of nvFuser, got {value.dtype} {list(value.shape)}")


class Region:
    """A subgraph that nvFuser runs as one function, with torch as the fallback.

    torch runs a call with an empty input, and it runs every call after nvFuser has failed once, with a FallbackWarning.

    Args:
        graph_module: the region; it returns a tuple of tensors.
        device: the device of its tensors.

    Raises:
        torch.OutOfMemoryError: at a call without memory for the results: torch would need as much.
    """

    __name__ = "nvfuser_region"

    def __init__(self, graph_module: fx.GraphModule, device: torch.device) -> None:
        self.graph = graph_module.graph
        self.text = text_of(self.graph)
        self.failed = False
        self._device = device
        results: Any = self.graph.output_node().args[0]
        self._results = [_Result(node.meta["val"]) for node in results]
        self._in_torch: Callable[[list[Any]], Any] = boxed(graph_module)

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        if self.failed or any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in inputs):
            results: Sequence[torch.Tensor] = self._in_torch(list(inputs))
            return results
        try:
            return self._in_nvfuser(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # nvFuser's binding turns torch's OutOfMemoryError into a RuntimeError.
            if re.search("out[ _]of[ _]memory", str(error), re.IGNORECASE):
                raise torch.OutOfMemoryError(str(error)) from error
            self.failed = True
            first_line = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}: {first_line}"
            say_once(f"nvFuser failed on a part of a graph, which torch runs from now on: {reason}")
            return self(*inputs)

    def _in_nvfuser(self, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        definition, lock = definition_for(self.text, self.graph, layout_of(inputs))
        with lock:
            results = definition.execute(list(inputs), device=self._device if self._device.type == "cuda" else None)
        # The rest of the graph relies on the traced dtypes, sizes and strides, and on new memory. nvFuser may return an
        # input as a result that is equal to it.
        taken = {_address(value) for value in inputs if isinstance(value, torch.Tensor)}
        fresh = []
        for one, traced in zip(results, self._results, strict=True):
            traced.check(one)
            result = _laid_out(one, traced.order)
            fresh.append(result.clone() if _address(result) in taken else result)
            taken.add(_address(result))
        return fresh


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _laid_out(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The value, contiguous with its dimensions in this order in memory; a copy only if it is not."""
    back = [order.index(dim) for dim in range(len(order))]
    return value.permute(tuple(order)).contiguous().permute(back)
