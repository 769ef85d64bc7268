"""explain -- the values that a fused function saves and recomputes, in bytes, without running it."""

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx
from torch import nn

from ..._torch.tracing import copy_of, is_sym_node, size_hint, torch_default_partition, torch_min_cut_partition
from ...names import name_of
from ...text_table import readable_bytes
from ..backends import expanded
from ..choose.cost import flops_of
from ..choose.machine import named_with_file
from ..choose.partitioners import OwnPartitioner, Partitioner, SavePolicy, cost_model_for, default, partitioner
from ..choose.peak_bytes import peak_bytes
from ..fused_function import FusedFunction
from ..fused_module import FusedModule
from ..joint_graph import CutGraph
from ..node_kinds import MASK_OPS, is_view, module_of, num_bytes, num_elements, source_line, storage_of, why_runs_once
from ..passes import COMPRESSED_FROM, NESTED, compression
from .capture import CapturedGraph, capture, explained_without_values
from .compression_errors import compression_errors
from .fake_copies import fake_copies
from .memory_report import MemoryReport, RecomputedValue, SavedValue, Totals
from .saved_bytes import saved_by_call, tensors_of

_RIVALS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {"default": default, "torch default": torch_default_partition, "torch min_cut": torch_min_cut_partition}
)


def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    backend: str | None = None,
    partition: str | Partitioner | None = None,
    compress: str | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> MemoryReport:
    """Return the values that `fuse(fn)` saves for backward and recomputes, each with its reason and its price.

    If graph breaks split `fn`, the report covers all graphs; a value that two of them save counts twice. Code
    between graphs, such as that of reversible blocks, counts for "eager" alone.

    Nothing runs and nothing is allocated, so a model on the meta device may be larger than this machine. But with
    `compress` and real tensors, forward and backward run twice, exact and compressed, for the errors in the report.

    Args:
        fn: a function of tensors, a module, or a fused one, which is explained with its own options. Fused modules
            inside it become a part of its graph, with the options of the call.
        args: its arguments: real tensors, or tensors on the meta device.
        backend: "inductor", "triton", "nvfuser" or "eager"; by default that of a fused function, or what "auto"
            tries first for the device of the tensors. It decides the graph and the prices.
        partition: as in `fuse`. Masks are made from seeds, as without `torch_random`.
        compress: as in `fuse`.
        device: the device that tensors on the meta device are taken to be on.
        kwargs: its keyword arguments.

    Raises:
        ValueError: no result requires grad, so nothing is saved; Dynamo does not compile `fn`; or a name is unknown.
        TypeError: `fn` cannot be called.
        PartitionError: the graph cannot be cut as requested.

    >>> def tutorial(a, b, c, d):
    ...     return (a + b + c + d).cos().cos()
    >>> report = explain(tutorial, *[torch.randn(8, 16, requires_grad=True) for _ in range(4)])
    >>> [(value.name, value.shape, value.num_bytes) for value in report.saved]
    [('add_2', (8, 16), 512)]
    >>> report.totals["eager"].saved_bytes
    1024
    """
    if not callable(fn):
        advice = f"; explain(fuselayers.build({fn!r}), tokens)" if isinstance(fn, str) else ""
        raise TypeError(f"explain takes a function or a module, got {type(fn).__name__}{advice}")
    fused = type(fn)._fused if isinstance(fn, FusedModule) else fn
    if isinstance(fused, FusedFunction):
        options = fused.options
        backend = backend or next(iter(options.chain), "inductor")  # `aot_function` has no named backend
        if partition is None:
            partition, compress = options.partition, compress or options.compress
    tensors = [*tensors_of((args, kwargs)), *(fn.parameters() if isinstance(fn, nn.Module) else ())]
    if backend is None or backend == "auto":
        on = {torch.device(device).type if tensor.is_meta else tensor.device.type for tensor in tensors}
        backend = expanded(("auto",), on)[0]
    cut = partitioner(partition or "min_cut", compress=compress)
    wanted = compression(getattr(cut, "compress", None))
    with (
        fake_copies(fn, args, kwargs, device=device) as (copied, copied_args, copied_kwargs, static),
        explained_without_values(fn),
    ):
        # Before the trace, in which errors that the function raises would lose their text.
        results = tensors_of(copied(*copied_args, **copied_kwargs))
        eager = saved_by_call(lambda: copied(*copied_args, **copied_kwargs), exempt=static)
    captured = capture(fn, *args, backend=backend, device=device, **kwargs)
    if not captured:
        if any(result.requires_grad for result in results):
            raise ValueError(
                f"Dynamo does not trace {name_of(fn)} (torch.compiler.disable, or a graph break within a loop), so "
                "fuse changes nothing, and the values that eager saves are saved; explain the part that can be traced"
            )
        raise ValueError(
            f"the results of {name_of(fn)} do not require grad for these arguments, so nothing is saved; let an input "
            "or a parameter require grad, and leave torch.no_grad()"
        )
    errors_of_values: list[dict[str, float]] = []
    errors_of_gradients: dict[str, float] = {}
    if wanted is not None and not any(tensor.is_meta for tensor in tensors):
        errors_of_values, errors_of_gradients = compression_errors(fn, args, kwargs, backend=backend, cut=cut)
    parts = [
        _Explained(graph, cut, errors or {}, fused=backend != "eager")
        for graph, errors in zip_longest(captured, errors_of_values[: len(captured)])
    ]
    totals = {"this": _sum(part.totals["this"] for part in parts), "eager": Totals(eager, None, 0, 0.0)}
    for name in (name for name in _RIVALS if all(name in part.totals for part in parts)):
        totals[name] = _sum(part.totals[name] for part in parts)
    cost = parts[0].cost
    return MemoryReport(
        subject=name_of(fn),
        backend=backend,
        partition=_text(cut),
        compress=None if wanted is None else wanted.name,
        gradient_errors=errors_of_gradients,
        machine=named_with_file(cost.machine),
        saved=tuple(value for part in parts for value in part.saved),
        recomputed=tuple(value for part in parts for value in part.recomputed),
        totals=totals,
        forward_flops=sum(part.flops[0] for part in parts),
        backward_flops=sum(part.flops[1] for part in parts),
        forward_ideal_bytes=sum(part.ideal_bytes[0] for part in parts),
        backward_ideal_bytes=sum(part.ideal_bytes[1] for part in parts),
        graphs=tuple(part.graph for part in parts),
        cost=cost,
    )


class _Explained:
    """The part of a memory report for one graph."""

    def __init__(self, captured: CapturedGraph, cut: Partitioner, errors: Mapping[str, float], *, fused: bool) -> None:
        self.joint = captured.joint(compress=getattr(cut, "compress", None))
        self._errors = errors
        self._policy = cut if isinstance(cut, SavePolicy) else None
        own_cost = None if self._policy is None else self._policy.cost
        self.cost = own_cost or cost_model_for(self.joint.device_types, fused=fused)
        if self._policy is not None:
            self._policy = replace(self._policy, cost=self.cost)
            forward, backward = self._policy.split(self.joint, fused=fused)
        else:
            forward, backward = _cut_copy(captured, cut)
        self.graph = CutGraph(self.joint, forward, backward)
        outgoing = _saved_nodes(forward, captured.num_forward_outputs)
        node_of = {node.name: node for node in self.joint.nodes}
        # A user's partitioner may add nodes that the joint graph does not have. The report describes these themselves.
        fewer: dict[fx.Node, int] = {}
        saved_nodes: dict[fx.Node, None] = {}
        for part in outgoing:
            exact, _ = part.meta.get(COMPRESSED_FROM, (part, None))
            node = node_of.get(exact.name, exact)
            saved_nodes[node] = None
            if exact is not part:
                fewer[node] = fewer.get(node, 0) + num_bytes(part)
        self.saved = tuple(self._saved_values(saved_nodes, fewer))
        calls = _recomputed_nodes(forward, backward)
        recomputed = [node_of.get(node.name.removesuffix(NESTED), node) for node in calls]
        self.recomputed = tuple(self._recomputed_value(node) for node in recomputed if not is_view(node))
        static = captured.static_input_indices
        self.totals = {"this": _totals(forward, backward, captured.num_forward_outputs, static)}
        for name, rival in _RIVALS.items():
            # torch's own partitioners cannot cut every graph.
            with contextlib.suppress(*(() if rival is default else (AssertionError, RuntimeError))):
                parts = _cut_copy(captured, rival)
                self.totals[name] = _totals(*parts, captured.num_forward_outputs, static)
        self.flops = tuple(sum(flops_of(node) for node in _calls(module)) for module in (forward, backward))
        self.ideal_bytes = tuple(_input_and_output_bytes(module) for module in (forward, backward))

    def _saved_values(self, nodes: Iterable[fx.Node], fewer: Mapping[fx.Node, int]) -> Iterable[SavedValue]:
        counted: set[fx.Node] = set()
        for node in nodes:
            value, storage = node.meta.get("val"), storage_of(node)
            static = storage in self.joint.static_inputs
            shape = tuple(size_hint(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()
            size = 0 if static or storage in counted or is_sym_node(node) else num_bytes(storage)
            counted.add(storage)
            exact = "nothing is compressed" if self.joint.compress is None else self.joint.why_exact.get(node)
            yield SavedValue(
                name=node.name,
                module=module_of(node),
                op="parameter" if static else "input" if node.op == "placeholder" else _op(node),
                source=source_line(node),
                shape=shape,
                dtype=str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "int",
                num_bytes=fewer.get(node, size),
                exact_bytes=size,
                error=self._errors.get(node.name),
                reason=self._why_saved(node, static),
                why_exact=None if node in fewer else exact,
            )

    def _why_saved(self, node: fx.Node, static: bool) -> str:
        """Compare the price of saving a value with that of recomputing it."""
        if self._policy is None:
            return "your partitioner chose it"
        readers = [user.name for user in node.users if user in self.joint.from_gradients]
        reads = f"read by {', '.join(readers[:2])}{' and others' if len(readers) > 2 else ''}; " if readers else ""
        if static:
            return f"{reads}it outlives the call anyway"
        if is_sym_node(node):
            return f"{reads}a size, 8 bytes"
        once = why_runs_once(node)
        if once is not None:
            return f"{reads}{once}"
        if self._policy.name == default.name:
            return f"{reads}the default saves what backward reads, and recomputes only views"
        saving, recomputing = self.cost.saving(node, self.joint), self.cost.recomputing(node, self.joint)
        priced = f"saving it costs {readable_bytes(self.cost.total(saving))} moved"
        if self.cost.total(recomputing) > self.cost.total(saving):
            return f"{reads}{priced}, recomputing it {readable_bytes(self.cost.total(recomputing))}"
        sources = [source for source in node.all_input_nodes if source not in self.joint.static_inputs]
        names = ", ".join(source.name for source in sources[:2]) or "its source"
        return f"{reads}{priced}; recomputing it would need {names}, which costs more"

    def _recomputed_value(self, node: fx.Node) -> RecomputedValue:
        price = self.cost.recomputing(node, self.joint)
        return RecomputedValue(
            name=node.name,
            module=module_of(node),
            op=_op(node),
            source=source_line(node),
            num_bytes=num_bytes(node),
            moved_bytes=price.moved,
            flops=flops_of(node),
        )


def _cut_copy(captured: CapturedGraph, cut: Callable[..., Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    parts: tuple[fx.GraphModule, fx.GraphModule] = cut(
        copy_of(captured.module),
        captured.joint_inputs,
        num_fwd_outputs=captured.num_forward_outputs,
        static_lifetime_input_indices=list(captured.static_input_indices),
    )
    return parts


def _saved_nodes(forward: fx.GraphModule, num_outputs: int) -> list[fx.Node]:
    """The values that a forward returns after its outputs."""
    returned: Any = forward.graph.output_node().args[0]
    return [value for value in returned[num_outputs:] if isinstance(value, fx.Node)]


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _recomputed_nodes(forward: fx.GraphModule, backward: fx.GraphModule) -> list[fx.Node]:
    """The ops of a backward that are ops of its forward; both keep the names of the joint graph."""
    names = {node.name for node in _calls(forward)}
    return [node for node in _calls(backward) if node.name.removesuffix(NESTED) in names]


def _totals(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, static: tuple[int, ...]) -> Totals:
    """Count the values that a forward and backward save and recompute, on the graphs of any partitioner.

    A mask counts one byte for each element, like the bools that torch saves instead.
    """
    inputs = forward.graph.find_nodes(op="placeholder")
    free = {inputs[index] for index in static if index < len(inputs)}
    storages = dict.fromkeys(storage_of(node) for node in _saved_nodes(forward, num_outputs))
    recomputed = [node for node in _recomputed_nodes(forward, backward) if not is_view(node)]
    return Totals(
        saved_bytes=sum(
            num_elements(node) if node.target in MASK_OPS else num_bytes(node) for node in storages if node not in free
        ),
        peak_bytes=peak_bytes(forward, backward, num_forward_outputs=num_outputs),
        recomputed_ops=len(recomputed),
        recomputed_flops=sum(flops_of(node) for node in recomputed),
    )


def _input_and_output_bytes(module: fx.GraphModule) -> int:
    """Bytes of the inputs and outputs of a graph, each storage once."""
    output = module.graph.output_node()
    ends = {storage_of(node) for node in (*module.graph.find_nodes(op="placeholder"), *output.all_input_nodes)}
    return sum(num_bytes(node) for node in ends)


def _op(node: fx.Node) -> str:
    # An element of a tuple is named after the op that returned the tuple.
    return str((node.all_input_nodes[0] if node.target is operator.getitem else node).target)


def _sum(totals: Iterable[Totals]) -> Totals:
    return Totals(*map(sum, zip(*map(astuple, totals), strict=True)))


def _text(cut: Partitioner) -> str:
    if not isinstance(cut, SavePolicy):
        return name_of(cut.own if isinstance(cut, OwnPartitioner) else cut)
    how = "" if cut.compress is None else f" in {cut.compress}"
    limit = "" if cut.limit is None else f"({cut.limit:,})"
    return cut.name + (limit if cut.peak is None else f"(peak={cut.peak:,})") + how
