"""Chooses the parts of a graph that nvFuser runs: ops that follow each other in the graph.

A region ends before an op that reads a result which torch computes from the region, such as a matrix product. Torch's
ops in between move. An op that does not read the region, such as a dropout mask, runs before it; an op that reads it,
such as the product for a weight's gradient, runs after it. Nothing else moves, so values live about as long as before,
and reads stay before writes.

- Views at the front of a region are removed, since torch makes them at no cost. A view or a constant that is read
  outside is recomputed there: the results of a region are new tensors, never views of each other or of inputs.
- A region with fewer than two ops that compute is left to torch: nothing would be fused.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from ...._torch.tracing import recompiled
from ...node_kinds import draws, writes
from ...passes import merge_equal_nodes_pass
from .arithmetic import ARITHMETIC
from .builder import NAMES_OF_DTYPES, Translation
from .shapes import SHAPES

TRANSLATIONS: Final[Mapping[Any, Translation]] = MappingProxyType({**ARITHMETIC, **SHAPES})
"""The translation of each op that nvFuser can run."""

# nvFuser's limit.
_HIGHEST_RANK: Final = 8
_FEWEST_OPS: Final = 2


def translation_of(node: fx.Node, device: torch.device) -> Translation | None:
    """Return the translation of a node, or None if torch runs it."""
    if node.op != "call_function":
        return None
    translation = TRANSLATIONS.get(node.target)
    if node.target is operator.getitem:
        parent = node.args[0]
        return translation if isinstance(parent, fx.Node) and translation_of(parent, device) is not None else None
    value = node.meta.get("val")
    results = value if isinstance(value, tuple | list) else [value]
    if translation is None or not all(_is_known(result, device) for result in results):
        return None
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):  # torch runs ops that take a symbolic size
            return None
        # A tensor without dimensions may be on the CPU.
        scalar = value.dim() == 0 and value.device.type == "cpu" and value.dtype in NAMES_OF_DTYPES
        if not scalar and not _is_known(value, device):
            return None
    return translation if translation.accepts(node) else None


def _is_known(value: Any, device: torch.device) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    empty = any(isinstance(size, int) and size == 0 for size in value.shape)
    fits = value.dim() <= _HIGHEST_RANK and value.dtype in NAMES_OF_DTYPES and not empty
    return fits and value.layout == torch.strided and value.device == device


def groups_of(graph_module: fx.GraphModule, device: torch.device) -> list[list[fx.Node]]:
    """Return the nodes of each region; the graph gets a copy of each view that is read outside of its region."""
    groups: list[list[fx.Node]] = []
    for run in _runs(graph_module.graph, device):
        trimmed = _without_views_at_front(run)
        if sum(TRANSLATIONS[node.target].kind == "computes" for node in trimmed) >= _FEWEST_OPS:
            groups.append(_with_views_outside(trimmed))
    return groups


def _runs(graph: fx.Graph, device: torch.device) -> list[list[fx.Node]]:
    """The longest runs of nodes that nvFuser can run; a run's nodes follow each other in the graph afterwards."""
    runs: list[list[fx.Node]] = [[]]
    inside: set[fx.Node] = set()
    behind: set[fx.Node] = set()  # torch's ops, which the region must not wait for
    for node in [*graph.nodes]:
        fuses = translation_of(node, device) is not None
        if fuses and behind.isdisjoint(node.all_input_nodes):
            if behind:
                runs[-1][-1].append(node)
            runs[-1].append(node)
            inside.add(node)
        elif fuses or writes(node):
            runs.append([node] if fuses else [])
            inside, behind = {*runs[-1]}, set()
        elif runs[-1]:
            reads = any(source in inside or source in behind for source in node.all_input_nodes)
            if reads or (_has_effect(node) and any(map(_has_effect, behind))):
                behind.add(node)
            else:
                runs[-1][0].prepend(node)
    return runs


def _has_effect(node: fx.Node) -> bool:
    return draws(node) or node.is_impure()


def _without_views_at_front(run: list[fx.Node]) -> list[fx.Node]:
    inside: dict[fx.Node, None] = {}
    for node in run:
        if TRANSLATIONS[node.target].kind != "moves" or any(source in inside for source in node.all_input_nodes):
            inside[node] = None
    return [*inside]


def _with_views_outside(group: list[fx.Node]) -> list[fx.Node]:
    """The group, after readers outside of it got copies of its views and constants; unread ones are erased."""
    inside, last = {*group}, group[-1]
    for node in group:
        outer = [user for user in node.users if user not in inside]
        if TRANSLATIONS[node.target].kind in ("moves", "makes") and outer:
            with node.graph.inserting_after(last):
                last = node.graph.node_copy(node)
            for user in outer:
                user.replace_input_with(node, last)
    for node in reversed(group):
        if not node.users:
            node.graph.erase_node(node)
            inside.remove(node)
    return [node for node in group if node in inside]


def extract(
    graph_module: fx.GraphModule,
    groups: Sequence[Sequence[fx.Node]],
    make: Callable[[fx.GraphModule], Callable[..., Any]],
) -> None:
    """Replace each group by one call of `make(graph of the group)`, which returns a tuple, and a getitem per result."""
    graph = graph_module.graph
    for group in groups:
        inside = {*group}
        own, copies = fx.Graph(), {}
        sources = dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside)
        for number, source in enumerate(sources):
            copies[source] = own.placeholder(f"x{number}")
            copies[source].meta = dict(source.meta)
        for node in group:
            # Nodes are named after their ops, so that equal groups have equal text.
            arguments = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = own.create_node("call_function", node.target, *arguments)
            copies[node].meta = {"val": node.meta["val"]}
        results = [node for node in group if any(user not in inside for user in node.users)]
        own.output(tuple(copies[node] for node in results))
        with graph.inserting_after(group[-1]):
            call = make(merge_equal_nodes_pass(fx.GraphModule(graph_module, own)))
            after = fused = graph.call_function(call, tuple(sources))
        fused.meta["val"] = tuple(node.meta["val"] for node in results)
        for number, node in enumerate(results):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (fused, number))
            after.meta = dict(node.meta)
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, after)
        for node in reversed(group):
            graph.erase_node(node)
    recompiled(graph_module)
