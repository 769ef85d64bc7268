"""report -- which backend serves each graph of a fused function, and why."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor

from .partitioners import Partitioner

__all__ = ["FusionReport", "GraphReport", "ServedGraph", "describe_graph", "label_of", "read_label"]

_SHOWN_INPUTS: Final = 3


@dataclass(frozen=True)
class GraphReport:
    """One graph of a fused function.

    Attributes:
        name: the function, what it was called with, and whether it will be differentiated.
        identity: eight letters that stand for the graph, its sizes and options, in every process.
        served_by: the backend; "unfused" where "auto" found the function fastest as it is.
        reason: why this one.
        seconds: of one call of each candidate, with its backward if there is one, where "auto" measured.
    """

    name: str
    identity: str
    served_by: str
    reason: str
    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds.items())
        return f"{self.name} [{self.identity}]: {self.served_by}, {self.reason}" + (f": {times}" if times else "")


@dataclass(frozen=True)
class FusionReport:
    """What serves a fused function. Its text has a line for each graph.

    Attributes:
        graphs: in the order in which they were compiled; none before the first call.
    """

    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "nothing is compiled yet: call the function first"


@dataclass
class ServedGraph:
    """What is known of a graph at this moment. Whoever compiles it, or chooses again later, writes the report anew.

    Attributes:
        report: the latest.
    """

    report: GraphReport


def describe_graph(
    graph_module: fx.GraphModule, *, name: str, partition: str | Partitioner, torch_random: bool
) -> GraphReport:
    """Return the report of a graph of Dynamo's that nothing serves yet.

    Its identity is the same in each process that traces the same graph for inputs of the same kind.
    """
    inputs = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    training = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    kinds = [f"{str(one.dtype).removeprefix('torch.')}{_sizes(one.shape)}" for one in tensors]
    shown = kinds[:_SHOWN_INPUTS] + ([f"{len(kinds) - _SHOWN_INPUTS} more"] if len(kinds) > _SHOWN_INPUTS else [])
    place = [f"{one.device.type} {one.requires_grad} {_sizes(one.stride())}" for one in tensors]
    # A body of an op of higher order is a graph of its own.
    code = [one.code for one in graph_module.modules() if isinstance(one, fx.GraphModule)]
    told = (code, kinds, place, training, torch_random, str(partition), _settings({one.device.type for one in tensors}))
    use = "training" if training else "forward"
    how = "" if partition == "min_cut" else f", {partition}" if isinstance(partition, str) else ", own partition"
    return GraphReport(
        name=f"{name}({', '.join(shown)}) {use}{how}",
        identity=hashlib.sha256(repr(told).encode()).hexdigest()[:8],
        served_by="",
        reason="",
    )


def _settings(device_types: set[str]) -> list[Any]:
    """What decides how ops compute, beside their arguments."""
    known = sorted(one for one in device_types if torch.amp.is_autocast_available(one))
    autocast = [(one, str(torch.get_autocast_dtype(one))) for one in known if torch.is_autocast_enabled(one)]
    return [autocast, str(torch.get_default_dtype()), torch.get_float32_matmul_precision()]


def label_of(report: GraphReport, sizes: Sequence[int] = ()) -> str:
    """Return what a graph's times are remembered by.

    Args:
        report: of the graph.
        sizes: the bit lengths of its symbolic sizes.

    >>> label_of(GraphReport("wave(float32[*]) training", "0a1b2c3d", "", ""), [4])
    'wave(float32[*]) training [0a1b2c3d], 8+'
    """
    reached = "".join(f", {1 << size - 1 if size else 0}+" for size in sizes)
    return f"{report.name} [{report.identity}]{reached}"


def read_label(label: str) -> tuple[str, str, str] | None:
    """Return the function with its inputs, the use and the identity that a label tells; None for that of an op.

    >>> read_label("wave(float32[*]) training [0a1b2c3d], 8+")
    ('wave(float32[*])', 'training', '0a1b2c3d')
    """
    found = re.fullmatch(r"(.*\)) (training|forward).* \[([0-9a-f]{8})\].*", label)
    return None if found is None else (found[1], found[2], found[3])


def _sizes(sizes: Sequence[Any]) -> str:
    """Sizes in words; one that may change from call to call is a *."""
    return f"[{', '.join(str(one) if type(one) is int else '*' for one in sizes)}]"
