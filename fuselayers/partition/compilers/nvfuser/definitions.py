"""Regions at run time, and the definitions that equal regions share."""

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx

from ...._torch.tracing import boxed
from ....errors import in_one_line, warn_once
from .availability import load_nvfuser
from .translate import InputLayouts, layout_of, order_of, translate


class _Definition:
    """An nvFuser definition. Its first execution changes it in several steps, and backward runs in another thread."""

    def __init__(self, graph: fx.Graph, layout: InputLayouts) -> None:
        module = load_nvfuser()
        with module.FusionDefinition() as self._made:
            translate(graph, layout, self._made, module)
        self._lock = threading.Lock()

    def execute(self, inputs: Sequence[Any], device: torch.device) -> Sequence[torch.Tensor]:
        with self._lock:
            results: Sequence[torch.Tensor] = self._made.execute(
                list(inputs), device=device if device.type == "cuda" else None
            )
        return results


# By text and layout, kept while a region uses them: the layers of a model are equal, and compiling takes seconds.
_definitions: Final = weakref.WeakValueDictionary[tuple[str, InputLayouts], _Definition]()
_lock: Final = threading.Lock()


class Region:
    """A subgraph that nvFuser runs as one function, with torch as the fallback.

    torch runs a call with an empty input, and it runs every call after nvFuser has failed once, with a FallbackWarning.

    Args:
        graph_module: the region; it returns a tuple of tensors.
        device: the device of its tensors.

    Raises:
        torch.OutOfMemoryError: at a call, if the results do not fit into memory; torch would need as much.
    """

    __name__ = "nvfuser_region"

    def __init__(self, graph_module: fx.GraphModule, device: torch.device) -> None:
        self.graph = graph_module.graph
        # With the sizes that its views depend on: regions of equal text have equal definitions.
        sizes = [str(node.meta["val"].shape) for node in self.graph.find_nodes(op="placeholder")]
        self._text = f"{self.graph} {sizes}"
        self._failed = False
        self._device = device
        self._definitions: dict[InputLayouts, _Definition] = {}
        results: Any = self.graph.output_node().args[0]
        self._orders = [order_of(node.meta["val"]) for node in results]
        self._in_torch: Callable[[list[Any]], Sequence[torch.Tensor]] = boxed(graph_module)

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._failed or any(value.numel() == 0 for value in inputs):
            return self._in_torch(list(inputs))
        try:
            return self._in_nvfuser(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # nvFuser's binding turns torch's OutOfMemoryError into a RuntimeError.
            if re.search("out[ _]of[ _]memory", str(error), re.IGNORECASE):
                raise torch.OutOfMemoryError(str(error)) from error
            self._failed = True
            warn_once(f"nvFuser failed on a part of a graph; torch runs this part from now on: {in_one_line(error)}")
            return self(*inputs)

    def _in_nvfuser(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = self._definition(layout_of(inputs)).execute(inputs, self._device)
        # The rest of the graph relies on the traced strides and on new memory. nvFuser may return an input as a result
        # that is equal to it.
        taken = {_address(value) for value in inputs}
        fresh = []
        for value, order in zip(results, self._orders, strict=True):
            result = _laid_out(value, order)
            fresh.append(result.clone() if _address(result) in taken else result)
            taken.add(_address(result))
        return fresh

    def _definition(self, layout: InputLayouts) -> _Definition:
        if layout not in self._definitions:
            with _lock:
                shared = _definitions.get((self._text, layout)) or _Definition(self.graph, layout)
                self._definitions[layout] = _definitions[self._text, layout] = shared
        return self._definitions[layout]


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _laid_out(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The value, contiguous with its dimensions in this order in memory; a copy only if it is not."""
    back = [order.index(dim) for dim in range(len(order))]
    return value.permute(tuple(order)).contiguous().permute(back)
