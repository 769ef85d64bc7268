"""fusion_report -- which backend serves each graph of a fused function, and why."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.fx as fx

_SHOWN: Final = 3


class GraphInputs(NamedTuple):
    """The tensors that a graph takes, without their memory. Its text names the first three.

    Attributes:
        tensors: dtype and sizes of each tensor; None for a symbolic size.
        training: whether the graph has a backward.
    """

    tensors: tuple[tuple[torch.dtype, tuple[int | None, ...]], ...]
    training: bool

    @classmethod
    def of(cls, graph_module: fx.GraphModule) -> "GraphInputs":
        """Describe the inputs of a Dynamo graph."""
        inputs = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        return cls(
            tuple((value.dtype, tuple(n if type(n) is int else None for n in value.shape)) for value in tensors),
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        )

    def __str__(self) -> str:
        kinds = [
            f"{str(dtype).removeprefix('torch.')}[{', '.join('*' if size is None else str(size) for size in sizes)}]"
            for dtype, sizes in self.tensors[:_SHOWN]
        ]
        kinds += [f"{len(self.tensors) - _SHOWN} more"] if len(self.tensors) > _SHOWN else []
        return f"({', '.join(kinds)}) {'training' if self.training else 'forward'}"


@dataclass(frozen=True)
class GraphReport:
    """One graph of a fused function.

    Attributes:
        name: the function, its tensors, and "training" if there is a backward, else "forward".
        served_by: the backend.
        reason: why this backend serves it.
    """

    name: str
    served_by: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.served_by}, {self.reason}"


@dataclass(frozen=True)
class FusionReport:
    """The backends that serve a fused function. Its text has a line for each graph.

    Attributes:
        graphs: in the order in which they were compiled; none before the first call.
    """

    graphs: tuple[GraphReport, ...]

    def __repr__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "nothing is compiled yet: call the function first"
