"""report -- which backend serves each graph of a fused function, and why."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor

from .partitioners import Partitioner

_SHOWN_INPUTS: Final = 3


@dataclass(frozen=True)
class GraphReport:
    """One graph of a fused function.

    Attributes:
        name: the function, its tensors, and "training" if there is a backward, else "forward".
        identity: eight letters that stand for the graph, its sizes and options, in every process.
        served_by: the backend; "plain" where "auto" found that the graph is not worth fusing.
        reason: why this one.
        seconds: of one call of each candidate, with its backward if there is one, where "auto" measured.
    """

    name: str
    identity: str
    served_by: str
    reason: str
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds.items())
        return f"{self.name} [{self.identity}]: {self.served_by}, {self.reason}" + (f": {times}" if times else "")


@dataclass(frozen=True)
class FusionReport:
    """The backends that serve a fused function. Its text has a line for each graph.

    Attributes:
        graphs: in the order in which they were compiled; none before the first call.
        guard_seconds: about how long Dynamo's guards take in each call, where "auto" measured.
    """

    graphs: tuple[GraphReport, ...]
    guard_seconds: float | None = None

    def __str__(self) -> str:
        if not self.graphs:
            return "nothing is compiled yet: call the function first"
        lines = [*map(str, self.graphs)]
        if self.guard_seconds is not None:
            lines.append(f"Dynamo's guards take about {1e3 * self.guard_seconds:.2g} ms of each call")
        return "\n".join(lines)


@dataclass
class ServedGraph:
    """Holds the latest report of a graph, which "auto" replaces when it has measured."""

    report: GraphReport


def describe_graph(
    graph_module: fx.GraphModule, *, name: str, partition: str | Partitioner, torch_random: bool
) -> GraphReport:
    """Return the report of a graph of Dynamo's that is not compiled yet.

    Its identity is the same in each process that traces the same graph for inputs of the same kind.
    """
    inputs = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    training = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    kinds = [f"{str(one.dtype).removeprefix('torch.')}{_sizes(one.shape)}" for one in tensors]
    shown = kinds[:_SHOWN_INPUTS] + ([f"{len(kinds) - _SHOWN_INPUTS} more"] if len(kinds) > _SHOWN_INPUTS else [])
    layouts = [f"{one.device.type} {one.requires_grad} {_sizes(one.stride())}" for one in tensors]
    # Higher-order ops hold graphs of their own.
    code = [one.code for one in graph_module.modules() if isinstance(one, fx.GraphModule)]
    identifying = (
        code,
        kinds,
        layouts,
        training,
        torch_random,
        str(partition),
        _settings({one.device.type for one in tensors}),
    )
    use = "training" if training else "forward"
    how = "" if partition == "min_cut" else f", {partition}" if isinstance(partition, str) else ", own partition"
    return GraphReport(
        name=f"{name}({', '.join(shown)}) {use}{how}",
        identity=hashlib.sha256(repr(identifying).encode()).hexdigest()[:8],
        served_by="",
        reason="",
    )


def _settings(device_types: set[str]) -> list[Any]:
    """Return the settings of torch that decide how ops compute."""
    known = sorted(one for one in device_types if torch.amp.is_autocast_available(one))
    autocast = [(one, str(torch.get_autocast_dtype(one))) for one in known if torch.is_autocast_enabled(one)]
    return [autocast, str(torch.get_default_dtype()), torch.get_float32_matmul_precision()]


def cache_key(report: GraphReport, sizes: Sequence[int] = ()) -> str:
    """Return the key under which a graph's times are stored; `sizes` are the bit lengths of its symbolic sizes.

    >>> cache_key(GraphReport("wave(float32[*]) training", "0a1b2c3d", "", ""), [4])
    'wave(float32[*]) training [0a1b2c3d], 8+'
    """
    reached = "".join(f", {1 << size - 1 if size else 0}+" for size in sizes)
    return f"{report.name} [{report.identity}]{reached}"


def identity_of(key: str) -> str:
    """Return the identity of the graph in a key of `cache_key`.

    >>> identity_of("wave(float32[*]) training [0a1b2c3d], 8+")
    '0a1b2c3d'
    """
    return key.rpartition("[")[2].partition("]")[0]


def _sizes(sizes: Sequence[Any]) -> str:
    """Return sizes as text; one that may change from call to call is a *."""
    return f"[{', '.join(str(one) if type(one) is int else '*' for one in sizes)}]"
