"""joint_graph and operator_map -- a function's forward and backward in one graph, and the origin of each op.

Like `capture`, they trace with fake tensors: nothing runs and nothing is allocated.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.fx as fx
from torch import nn

from .._torch.dispatch import pytree
from .._torch.guards import is_graph_break
from .._torch.tracing import descriptors
from .capture import ROOT, Trace, compile_functional, trace
from .node_kinds import source_line

_Origin: TypeAlias = tuple[Any, str, str]  # autograd's number, the line, the module


@dataclass(frozen=True)
class InputSpec:
    """One input of a joint graph.

    Attributes:
        name: its placeholder in the graph.
        kind: "gradient" is an incoming one, of an output. A tensor that a function closes over is a "parameter" if it
            requires grad, else a "buffer".
        target: a parameter's or buffer's name, as in `named_parameters()`, prefixed with the variable that holds the
            module if the function is no module; an argument's name and path (`batch['ids'][0]`); for a gradient, the
            name of its output.
    """

    name: str
    kind: Literal["parameter", "buffer", "argument", "gradient"]
    target: str


@dataclass(frozen=True)
class OutputSpec:
    """One output of a joint graph.

    Attributes:
        name: the node of the graph that computes it.
        kind: "mutation" is the new value of an input that the function writes to.
        target: an output's path in the function's result (`result`, `result['loss']`), or "" if it is not returned
            itself; for a gradient, the target of its input; for a mutation, the target of the input written to.
    """

    name: str
    kind: Literal["output", "gradient", "mutation"]
    target: str


@dataclass(frozen=True)
class JointGraphExport:
    """A forward and backward as one graph of ATen ops, with a signature. Its text has both.

    Attributes:
        module: takes one value for each of `inputs`, in order, and returns a tuple with one for each of `outputs`. It
            writes to none of its inputs.
        inputs: the function's inputs, then the gradients of its outputs.
        outputs: the new values of mutated inputs and the function's outputs, then the gradients of its inputs.
    """

    module: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    def __str__(self) -> str:
        lines = ["inputs:", *map(_listed, self.inputs), "outputs:", *map(_listed, self.outputs)]
        return "\n".join([*lines, self.module.print_readable(print_output=False).strip()])


@dataclass(frozen=True)
class OperatorRecord:
    """The ops of one differentiable step of a function.

    Attributes:
        forward_ops: its ops in forward, in order: "aten.addmm.default".
        backward_ops: the ops that autograd runs for it, in order.
        source: "file:line: code" of the innermost line that is not torch's, or "" where there is none.
        module: the fully qualified name of the innermost module that ran it, or "" outside of any submodule.
    """

    forward_ops: tuple[str, ...]
    backward_ops: tuple[str, ...]
    source: str
    module: str


def joint_graph(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> JointGraphExport:
    """Return the joint forward and backward graph of `fn(*args, **kwargs)`, with a signature.

    The ops are ATen's, as the eager backend gets them, not decomposed; the new value of a mutated input is an output.
    Nothing runs: `args` may be real, fake or on the meta device.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: `fn` has a graph break (the message says where), or no output of it requires grad.

    >>> exported = joint_graph(torch.nn.Linear(4, 2), torch.randn(3, 4))
    >>> print(exported)
    inputs:
      primals_1: parameter weight
      primals_2: parameter bias
      primals_3: argument input
      tangents_1: gradient addmm
    outputs:
      addmm: output result
      ...: gradient weight
      ...: gradient bias
    class GraphModule(torch.nn.Module):
        def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[2]", primals_3: "f32[3, 4]", tangents_1: "f32[3, 2]"):
            ...
            t: "f32[4, 2]" = torch.ops.aten.t.default(primals_1);  primals_1 = None
            addmm: "f32[3, 2]" = torch.ops.aten.addmm.default(primals_2, primals_3, t);  primals_2 = t = None
            ...
    """
    (only,) = _traces("joint_graph", fn, args, kwargs, fullgraph=True)
    module, names = only.graph.module, _Names(only)
    graph = module.graph
    output = next(iter(reversed(graph.nodes)))
    present = [
        (node, desc)
        for node, desc in zip(output.args[0], output.meta["desc"], strict=True)
        if isinstance(node, fx.Node)
    ]
    output_names = {desc: node.name for node, desc in present}
    inputs = tuple(names.input(node, output_names) for node in graph.nodes if node.op == "placeholder")
    outputs = tuple(names.output(node, desc) for node, desc in present)
    output.args = (tuple(node for node, _ in present),)
    output.meta["desc"] = [desc for _, desc in present]
    graph.set_codegen(fx.graph.CodeGen())  # AOTAutograd's takes two lists, and returns one
    graph.lint()
    module.recompile()
    return JointGraphExport(module, inputs, outputs)


def operator_map(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[OperatorRecord, ...]:
    """Return, in the order of forward, the ops of backward that belong to the ops, line and module of forward.

    Autograd numbers its nodes, and AOTAutograd records for each op the number of its autograd node. Ops without a
    gradient have the number of the op before them; their line and module distinguish them. If no op of forward has a
    number, the ops of backward get a record of their own. With graph breaks, the graphs follow each other.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: no output of `fn` requires grad.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    >>> for record in operator_map(layers, torch.randn(3, 4, requires_grad=True)):
    ...     print(record.module, *record.forward_ops, "->", *record.backward_ops)
    0 aten.t.default -> aten.t.default
    0 aten.addmm.default -> aten.t.default aten.mm.default ... aten.sum.dim_IntList aten.view.default
    1 aten.gelu.default -> aten.gelu_backward.default
    """
    traces = _traces("operator_map", fn, args, kwargs, fullgraph=False)
    return tuple(record for one in traces for record in _records(one))


def _traces(
    caller: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, fullgraph: bool
) -> tuple[Trace, ...]:
    if not callable(fn):
        raise TypeError(f"{caller} takes a function or a module, got {type(fn).__name__}")
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        traces = trace(fn, args, kwargs, compiler=compile_functional, fullgraph=fullgraph)
    except Exception as error:
        if not is_graph_break(error):
            raise
        stack = list(getattr(error, "real_stack", None) or ())
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "a place that Dynamo does not name"
        raise ValueError(
            f"{caller} needs one graph, and {name} breaks it at {where} ({str(error).splitlines()[0]}); change that "
            "line, or use `capture`, which returns a graph for each part"
        ) from error
    if not traces:
        raise ValueError(
            f"{caller} needs a backward, and no output of {name} requires grad here; give it a parameter or an "
            "argument that does (`x.requires_grad_()`), outside of torch.no_grad()"
        )
    return traces


class _Names:
    """The user's names for the inputs and modules of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._scope = {"L": {"traced_fn": trace.fn, "args": trace.args, "kwargs": trace.kwargs}}
        self._registered: dict[int, str] = {}  # Dynamo's source of a tied parameter may be another of its names
        if isinstance(trace.fn, nn.Module):
            for name, tensor in (*trace.fn.named_parameters(), *trace.fn.named_buffers()):
                self._registered.setdefault(id(tensor), name)
        self._arguments = _argument_names(trace.fn, len(trace.args))
        returned: dict[int, str] = {}
        for path, leaf in _leaves(trace.result):
            returned.setdefault(id(leaf), path)  # a tensor that is returned twice has its first path
        self._results = [returned.get(id(value), "") for value in trace.outputs]

    def input(self, node: fx.Node, output_names: dict[Any, str]) -> InputSpec:
        desc = node.meta["desc"]
        if isinstance(desc, descriptors.TangentAOTInput):
            return InputSpec(node.name, "gradient", output_names.get(desc.output, desc.output.expr()))
        kind, target = self._origin(desc)
        return InputSpec(node.name, kind, target)

    def output(self, node: fx.Node, desc: Any) -> OutputSpec:
        if isinstance(desc, descriptors.GradAOTOutput):
            return OutputSpec(node.name, "gradient", self._origin(desc.grad_of)[1])
        if isinstance(desc, descriptors.InputMutationAOTOutput):
            return OutputSpec(node.name, "mutation", self._origin(desc.mutated_input)[1])
        if isinstance(desc, descriptors.PlainAOTOutput):
            return OutputSpec(node.name, "output", self._results[desc.idx] if desc.idx < len(self._results) else "")
        return OutputSpec(node.name, "output", "")

    def of_source(self, source: str) -> str:
        """Return an expression of Dynamo's as the user would write it: `L['args'][0]._modules['up']` is `block.up`."""
        expression, *steps = re.split(r"\.__closure__\[(\d+)\]\.cell_contents", source)
        text = expression
        for cell, rest in zip(steps[::2], steps[1::2], strict=True):
            function = eval(expression, dict(self._scope))  # Dynamo's expression, evaluated over the traced copies
            text = function.__code__.co_freevars[int(cell)] + rest
            expression += f".__closure__[{cell}].cell_contents{rest}"
        text = re.sub(r"^L\['args'\]\[(\d+)\]", lambda found: self._arguments[int(found[1])], text)
        text = re.sub(r"^L\['kwargs'\]\['(\w+)'\]", r"\1", text).removeprefix(ROOT).removeprefix(".__self__")
        text = re.sub(r"^(?:\.\w+)*\.__globals__\['(\w+)'\]", r"\1", text)
        text = re.sub(r"^(?:G|___unnamed_scope_\w+)\['(\w+)'\]", r"\1", text)
        text = re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])(.+?)\1\]", r".\2", text)
        return text.removeprefix(".")

    def _origin(self, desc: Any) -> tuple[Literal["parameter", "buffer", "argument"], str]:
        while not isinstance(desc, descriptors.PlainAOTInput):
            inner = getattr(desc, "base", getattr(desc, "base_of", None))
            if inner is None:
                return "argument", str(desc.expr())
            desc = inner
        source, tensor = self._trace.sources[desc.idx], self._trace.inputs[desc.idx]
        target = self._registered.get(id(tensor)) or self.of_source(source)
        if "._parameters[" in source:
            return "parameter", target
        if "._buffers[" in source:
            return "buffer", target
        if source.startswith(("L['args']", "L['kwargs']")):
            return "argument", target
        return ("parameter" if getattr(tensor, "requires_grad", False) else "buffer"), target


def _argument_names(fn: Any, count: int) -> list[str]:
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return [f"args[{index}]" for index in range(count)]
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    rest = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "args")
    return [*names[:count], *(f"{rest}[{index}]" for index in range(count - len(names)))]


def _leaves(result: Any) -> list[tuple[str, Any]]:
    leaves, _ = pytree.tree_flatten_with_path(result)
    return [("result" + "".join(str(key) for key in path), leaf) for path, leaf in leaves]


def _records(trace: Trace) -> list[OperatorRecord]:
    names = _Names(trace)
    forward: dict[_Origin, list[str]] = {}
    backward: dict[Any, list[str]] = {}
    first: dict[Any, _Origin] = {}  # the op that autograd made a node for; ops without one come after it
    for node in trace.graph.module.graph.nodes:  # forward's come before backward's
        if not isinstance(node.target, torch._ops.OpOverload):
            continue  # an element of a tuple is no op
        number = node.meta.get("seq_nr")
        if "backward" in str(node.meta.get("partitioner_tag", "")):
            origin = first.setdefault(number, (number, source_line(node), _module(node, "fwd_nn_module_stack", names)))
            forward.setdefault(origin, [])
            backward.setdefault(number, []).append(str(node.target))
        else:
            origin = (number, source_line(node), _module(node, "nn_module_stack", names))
            first.setdefault(number, origin)
            forward.setdefault(origin, []).append(str(node.target))
    records = []
    for origin, ops in forward.items():
        number, source, module = origin
        in_backward = backward.get(number, []) if first[number] == origin else []
        records.append(OperatorRecord(tuple(ops), tuple(in_backward), source, module))
    return records


def _module(node: fx.Node, key: str, names: _Names) -> str:
    stack = node.meta.get(key)
    return names.of_source(list(stack.values())[-1][0]) if stack else ""


def _listed(spec: InputSpec | OutputSpec) -> str:
    return f"  {spec.name}: {spec.kind} {spec.target}".rstrip()
