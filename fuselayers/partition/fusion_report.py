"""fusion_report -- which backend serves each graph of a fused function, and why."""

from dataclasses import dataclass


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
