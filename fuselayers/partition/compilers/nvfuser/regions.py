"""Chooses the parts of a graph that nvFuser runs: groups of connected ops that can run as one.

Groups grow along the edges of the graph, unless an op outside of a group would have to run in the middle of it. Then:

- views at the front of a group are removed, since torch makes them at no cost. A view or a constant that is read
  outside is recomputed there: the results of a region are tensors of their own, never views of each other or of inputs;
- a group with fewer than two ops that compute is left to torch: nothing would be fused.

Note: [a pass of our own] torch.fx's CapabilityBasedPartitioner joins groups that are not connected, which makes values
live longer (before torch 2.12 that cannot be turned off), and its result depends on the version. torch.fx's
`fuse_by_partitions` reorders the whole graph, and backward's memory depends on the order.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from ...node_kinds import draws, num_bytes, writes
from ...passes import merge_equal_nodes_pass
from .availability import fused_device_types
from .builder import NAMES_OF_DTYPES, Kind, Rule
from .pointwise import POINTWISE
from .reductions import REDUCTIONS
from .shapes import SHAPES

RULES: Final[Mapping[Any, Rule]] = MappingProxyType({**POINTWISE, **REDUCTIONS, **SHAPES})
"""The rule of each op that nvFuser can run."""

# nvFuser's limit.
_HIGHEST_RANK: Final = 8
_FEWEST_OPS: Final = 2

Group = Sequence[fx.Node]
"""The nodes of one region, in the order of the graph."""


def rule_of(node: fx.Node, device: torch.device) -> Rule | None:
    """Return the rule of a node, or None if torch runs it."""
    if node.op != "call_function":
        return None
    rule = RULES.get(node.target)
    if node.target is operator.getitem:
        parent = node.args[0]
        return rule if isinstance(parent, fx.Node) and rule_of(parent, device) is not None else None
    results = _tensors(node.meta.get("val"))
    if rule is None or not results or not all(_is_known(value, device) for value in results):
        return None
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            # A tensor without dimensions may be on the CPU.
            scalar = value.dim() == 0 and value.device.type == "cpu" and value.dtype in NAMES_OF_DTYPES
            if not scalar and not _is_known(value, device):
                return None
        elif not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
            return None
    return rule if rule.accepts(node) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def _is_known(value: torch.Tensor, device: torch.device) -> bool:
    plain = value.layout == torch.strided and not value.is_sparse
    empty = any(isinstance(size, int) and size == 0 for size in value.shape)
    fits = value.dim() <= _HIGHEST_RANK and value.dtype in NAMES_OF_DTYPES and not empty
    return plain and fits and value.device == device and device.type in fused_device_types()


def groups_of(graph_module: fx.GraphModule, device: torch.device) -> list[Group]:
    """Return the regions of a graph; the graph gets a copy of each view that is read outside of its region."""
    graph = graph_module.graph
    kinds = {node: rule.kind for node in graph.nodes if (rule := rule_of(node, device)) is not None}
    groups: list[Group] = []
    for group in _grown(graph, kinds):
        trimmed = _without_views_at_front(group, kinds)
        if sum(kinds[node] == Kind.COMPUTES for node in trimmed) >= _FEWEST_OPS:
            groups.append(_with_views_outside(trimmed, kinds))
    return groups


class _Growing:
    """A group that grows: its nodes, the outside nodes that they read, the positions of its first and last node."""

    def __init__(self, node: fx.Node, index: int) -> None:
        self.nodes = {node}
        self.sources = {*node.all_input_nodes}
        self.first = self.last = index

    def add(self, other: "_Growing") -> None:
        """Add another group, in a time that depends on that one's size alone."""
        self.sources -= other.nodes
        self.sources |= other.sources - self.nodes
        self.nodes |= other.nodes
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)


def _grown(graph: fx.Graph, kinds: Mapping[fx.Node, Kind]) -> list[list[fx.Node]]:
    position = {node: number for number, node in enumerate(graph.nodes)}
    group_of: dict[fx.Node, _Growing] = {}

    def reaches(target: _Growing, source: _Growing) -> bool:
        """True if a path leads from one group to the other through something outside both."""
        # A node before the whole source cannot depend on it.
        if target.last < source.first:
            return False
        stack = [*target.sources - source.nodes]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            if node in source.nodes or node in target.nodes:
                return True
            between = group_of.get(node)
            seen |= {node} if between is None else between.nodes
            if (position[node] if between is None else between.last) > source.first:
                stack += node.all_input_nodes if between is None else between.sources
        return False

    def join(own: _Growing, other: _Growing | None) -> None:
        if other is not None and other is not own and not (reaches(own, other) or reaches(other, own)):
            # The smaller into the larger, so that a node moves a few times at most.
            small, large = sorted((own, other), key=lambda group: len(group.nodes))
            large.add(small)
            group_of.update(dict.fromkeys(small.nodes, large))

    for node in graph.nodes:
        if node not in kinds:
            continue
        group_of[node] = _Growing(node, position[node])
        for source in node.all_input_nodes:
            join(group_of[node], group_of.get(source))
    # Then join groups that read the same tensor, if it is the largest that both read: it is then read once.
    for source in graph.nodes:
        readers = [user for user in source.users if user in group_of and source not in group_of[user].nodes]
        for reader in readers[1:]:
            pair = group_of[readers[0]], group_of[reader]
            if all(num_bytes(source) >= num_bytes(other) for group in pair for other in group.sources):
                join(*pair)
    grown = dict.fromkeys(group_of.values())
    return [sorted(group.nodes, key=position.__getitem__) for group in grown]


def _without_views_at_front(group: list[fx.Node], kinds: Mapping[fx.Node, Kind]) -> list[fx.Node]:
    inside: dict[fx.Node, None] = {}
    for node in group:
        if kinds[node] != Kind.MOVES or any(source in inside for source in node.all_input_nodes):
            inside[node] = None
    return [*inside]


def _with_views_outside(group: list[fx.Node], kinds: Mapping[fx.Node, Kind]) -> list[fx.Node]:
    """The group, after readers outside of it got copies of its views and constants; unread ones are erased."""
    inside = {*group}
    for node in reversed(group):
        outer = [user for user in node.users if user not in inside]
        if kinds[node] in (Kind.MOVES, Kind.MAKES) and outer:
            with node.graph.inserting_after(node):
                copy = node.graph.node_copy(node)
            for user in outer:
                user.replace_input_with(node, copy)
        if not node.users:
            node.graph.erase_node(node)
            inside.remove(node)
    return [node for node in group if node in inside]


def extract(
    graph_module: fx.GraphModule, groups: Sequence[Group], make: Callable[[fx.GraphModule], Callable[..., Any]]
) -> fx.GraphModule:
    """Replace each group by one call of `make(graph of the group)`, which returns a tuple, and a getitem per result."""
    graph = graph_module.graph
    _bring_together(graph, groups)
    for group in groups:
        inside = {*group}
        own, copies = fx.Graph(), {}
        sources = dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside)
        for source in sources:
            copies[source] = own.placeholder(source.name)
            copies[source].meta = dict(source.meta)
        for node in group:
            copies[node] = own.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
        results = [node for node in group if any(user not in inside for user in node.users)]
        own.output(tuple(copies[node] for node in results))
        call = make(_tidied(fx.GraphModule(graph_module, own)))
        with graph.inserting_after(group[-1]):
            fused = graph.call_function(call, tuple(sources))
        fused.meta["val"] = tuple(node.meta["val"] for node in results)
        after = fused
        for number, node in enumerate(results):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (fused, number))
            after.meta = dict(node.meta)
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, after)
        for node in reversed(group):
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()
    return graph_module


def _tidied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph of a region with each value computed once."""
    # A cut marks the nodes of its two sides. Without the marks, equal nodes of forward and backward can be merged.
    for node in graph_module.graph.nodes:
        for mark in ("partitioner_tag", "seq_nr", "recompute", "ac_graph_id"):
            node.meta.pop(mark, None)
    return merge_equal_nodes_pass(graph_module)


def _bring_together(graph: fx.Graph, groups: Sequence[Group]) -> None:
    """Order the graph so that the nodes of a group follow each other, and little else moves.

    A group takes the place of its last node, or the first place after its sources. Nodes with effects stay in their
    order, and a write to an input stays after all earlier nodes.
    """
    import networkx as nx  # 0.2 s

    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    unit_of = {node: number for number, node in enumerate(nodes)}
    for group in groups:
        unit_of |= dict.fromkeys(group, max(unit_of[node] for node in group))
    units: dict[int, list[fx.Node]] = {}
    for node in nodes:
        units.setdefault(unit_of[node], []).append(node)
    waits: nx.DiGraph[int] = nx.DiGraph()
    waits.add_nodes_from(units)
    effect: int | None = None
    for position, node in enumerate(nodes):
        unit = unit_of[node]
        earlier = [unit_of[source] for source in node.all_input_nodes if source in unit_of]
        if writes(node):
            earlier += [unit_of[one] for one in nodes[:position]]
        if writes(node) or draws(node) or node.is_impure():
            earlier += [] if effect is None else [effect]
            effect = unit
        waits.add_edges_from((one, unit) for one in earlier if one != unit)
    output = graph.output_node()
    for unit in nx.lexicographical_topological_sort(waits):
        for node in units[unit]:
            output.prepend(node)
