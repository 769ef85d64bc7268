"""joint_graph -- a function's forward and backward in one graph, with a signature.

Like `capture`, it traces with fake tensors: nothing runs and nothing is allocated.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.fx as fx
from torch import Tensor, nn

from ..._torch.dispatch import pytree
from ..._torch.guards import is_graph_break
from ..._torch.tracing import descriptors
from ...names import name_of
from .capture import ROOT, Trace, compile_functional, trace


@dataclass(frozen=True)
class Spec:
    """One input or output of a joint graph.

    Attributes:
        name: the name of its node in the graph.
        kind: for an input "parameter", "buffer", "argument", or "gradient" if it is an incoming gradient. A tensor that
            a function closes over is a "parameter" if it requires grad, else a "buffer". For an output "output",
            "gradient", or "mutation", which is the new value of an input that the function writes to.
        target: for a parameter or buffer its name, as in `named_parameters()`, or Dynamo's expression if the module
            does not hold it; for an argument its name and path (`batch['ids'][0]`); for an output its path in the
            result (`result['loss']`), or "" if it is not returned itself; for a gradient the name of its output, or the
            target of its input; for a mutation the target of the input that is written to.
    """

    name: str
    kind: Literal["parameter", "buffer", "argument", "output", "gradient", "mutation"]
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
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]

    def __str__(self) -> str:
        lines = ["inputs:", *map(_listed, self.inputs), "outputs:", *map(_listed, self.outputs)]
        return "\n".join([*lines, self.module.print_readable(print_output=False).strip()])


def joint_graph(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> JointGraphExport:
    """Return the joint forward and backward graph of `fn(*args, **kwargs)`, with a signature.

    The ops are ATen's, not decomposed, as for the eager backend. The new value of a mutated input is an output.
    Nothing runs: `args` may be real, fake or on the meta device.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: `fn` has a graph break (the message says where), or none of its outputs requires grad.

    >>> import torch
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
    traced = _trace(fn, args, kwargs)
    module, names = traced.graph.module, _Names(traced)
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
    graph.set_codegen(fx.graph.CodeGen())  # with AOTAutograd's, the function takes two lists and returns one
    graph.lint()
    module.recompile()
    return JointGraphExport(module, inputs, outputs)


def _trace(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
    if not callable(fn):
        raise TypeError(f"joint_graph takes a function or a module, got {type(fn).__name__}")
    try:
        traces = trace(fn, args, kwargs, compiler=compile_functional, fullgraph=True)
    except Exception as error:
        if not is_graph_break(error):
            raise
        stack = list(getattr(error, "real_stack", None) or ())
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "a place that Dynamo does not name"
        raise ValueError(
            f"joint_graph needs one graph, and {name_of(fn)} breaks it at {where} ({str(error).splitlines()[0]}); "
            "change that line, or use `capture`, which returns a graph for each part"
        ) from error
    if not traces:
        raise ValueError(
            f"joint_graph needs a backward, and no output of {name_of(fn)} requires grad here; give it a parameter or "
            "an argument that does (`x.requires_grad_()`), outside of torch.no_grad()"
        )
    return traces[0]


class _Names:
    """The user's names for the inputs and outputs of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        named = [("argument", path, leaf) for path, leaf in _arguments(trace)]
        if isinstance(trace.fn, nn.Module):
            named += [("parameter", name, tensor) for name, tensor in trace.fn.named_parameters()]
            named += [("buffer", name, tensor) for name, tensor in trace.fn.named_buffers()]
        self._origins = {id(tensor): (kind, name) for kind, name, tensor in reversed(named)}
        # A tensor that is returned twice keeps its first path.
        returned = {id(leaf): path for path, leaf in reversed(_leaves("result", trace.result))}
        self._results = [returned.get(id(value), "") for value in trace.outputs]

    def input(self, node: fx.Node, output_names: dict[Any, str]) -> Spec:
        desc = node.meta["desc"]
        if isinstance(desc, descriptors.TangentAOTInput):
            return Spec(node.name, "gradient", output_names.get(desc.output, desc.output.expr()))
        kind, target = self._origin(desc)
        return Spec(node.name, kind, target)

    def output(self, node: fx.Node, desc: Any) -> Spec:
        if isinstance(desc, descriptors.GradAOTOutput):
            return Spec(node.name, "gradient", self._origin(desc.grad_of)[1])
        if isinstance(desc, descriptors.InputMutationAOTOutput):
            return Spec(node.name, "mutation", self._origin(desc.mutated_input)[1])
        if isinstance(desc, descriptors.PlainAOTOutput):
            return Spec(node.name, "output", self._results[desc.idx] if desc.idx < len(self._results) else "")
        return Spec(node.name, "output", "")

    def _origin(self, desc: Any) -> Any:
        while not isinstance(desc, descriptors.PlainAOTInput):
            inner = getattr(desc, "base", getattr(desc, "base_of", None))
            if inner is None:
                return "argument", str(desc.expr())
            desc = inner
        tensor = self._trace.inputs[desc.idx]
        if id(tensor) in self._origins:
            return self._origins[id(tensor)]
        kind = "argument" if tensor is None else "parameter" if tensor.requires_grad else "buffer"
        source = re.sub(r"^G\['___unnamed_scope_\w+'\]", "", self._trace.sources[desc.idx])  # holds an address
        return kind, source.removeprefix(ROOT).removeprefix(".")


def _arguments(trace: Trace) -> list[tuple[str, Any]]:
    """The tensors of the arguments, by the names of the parameters."""
    try:
        forward = trace.fn.forward if isinstance(trace.fn, nn.Module) else trace.fn
        named = inspect.signature(forward).bind(*trace.args, **trace.kwargs).arguments
    except (TypeError, ValueError):  # a builtin without a signature
        named = {"args": trace.args, "kwargs": trace.kwargs}
    leaves = [leaf for name, value in named.items() for leaf in _leaves(name, value)]
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    leaves, _ = pytree.tree_flatten_with_path(value)
    return [(name + "".join(map(str, path)), leaf) for path, leaf in leaves]


def _listed(spec: Spec) -> str:
    return f"  {spec.name}: {spec.kind} {spec.target}".rstrip()
