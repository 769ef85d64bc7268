"""Regions at run time, and the bounded cache of definitions that all graphs share."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.fx as fx

from ...._torch.tracing import boxed
from ...fallback_warning import say_once
from .availability import load_nvfuser
from .translate import Layout, layout_of, order_of, text_of, translate

CACHE_SIZE: Final = 1024
"""The number of cached definitions. A step of a transformer needs about twenty for each layout of its inputs, whatever
its depth."""

_Key = tuple[str, Layout]


class Definition:
    """A `FusionDefinition` that threads may share.

    nvFuser's first execution changes the definition, in several steps, so only one thread may be in it. Later
    executions only read.
    """

    def __init__(self, fusion: Any) -> None:
        self._fusion = fusion
        self._first: Final = threading.Lock()
        self._has_run = False

    def execute(self, inputs: Sequence[Any], device: torch.device | None) -> Sequence[torch.Tensor]:
        """Return the results for these inputs."""
        with nullcontext() if self._has_run else self._first:
            results: Sequence[torch.Tensor] = self._fusion.execute(list(inputs), device=device)
        self._has_run = True
        return results


_definitions: OrderedDict[_Key, Definition] = OrderedDict()
# Backward runs in a thread of autograd.
_lock: Final = threading.Lock()


def definition_for(text: str, graph: fx.Graph, layout: Layout) -> Definition:
    """Return the definition of a region, whose text is `text`, for a layout of its inputs. Definitions are cached."""
    key = (text, layout)
    with _lock:
        found = _definitions.get(key)
        if found is not None:
            _definitions.move_to_end(key)
            return found
        made = Definition(_define(graph, layout))
        _definitions[key] = made
        if len(_definitions) > CACHE_SIZE:
            _definitions.popitem(last=False)
        return made


def _define(graph: fx.Graph, layout: Layout) -> Any:
    module = load_nvfuser()
    failure: Exception | None = None
    with module.FusionDefinition() as definition:
        # nvFuser would print an error that is raised through the `with`.
        try:
            translate(graph, layout, definition, module)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
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
        definition = definition_for(self.text, self.graph, layout_of(inputs))
        device = self._device if self._device.type == "cuda" else None
        results = definition.execute(inputs, device)
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
    if all(dim == number for number, dim in enumerate(order)):
        return value.contiguous()
    outer_first = value.permute(tuple(order))
    if outer_first.is_contiguous():
        return value
    back = [0] * len(order)
    for number, dim in enumerate(order):
        back[dim] = number
    return outer_first.contiguous().permute(tuple(back))
