"""capture -- the joint graphs of a function, as a backend's partitioner receives them, without running the function.

Tracing uses fake tensors, which have a shape, a dtype and a device, but no memory. So a model may be larger than the
machine.

Note: [why not aot_export_joint_with_descriptors] It traces one graph: a graph break is an error, and so is a module in
the arguments. It returns ATen ops, not the graph that Inductor gives its partitioner. Meta tensors stay on "meta".
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..._torch.dispatch import DataDependentOutputException, DynamicOutputShapeException
from ..._torch.guards import dynamo_optimize, forget_compiled_code
from ..._torch.tracing import copy_of
from ...names import name_of, no_such
from ..backends import COMPILERS
from ..choose.partitioners import default
from ..cut import joint_graph_of
from ..joint_graph import JointGraph
from .fake_copies import fake_copies


@dataclass(frozen=True)
class CapturedGraph:
    """One joint forward and backward graph, before it is partitioned.

    Attributes:
        module: the joint graph; its placeholders are the forward's inputs, then the gradients of the outputs.
        num_forward_outputs: how many of its outputs are the forward's; the others are gradients.
        static_input_indices: which of the forward's inputs outlive the call, such as parameters.
        joint_inputs: example inputs of the graph: fake tensors, nested as AOTAutograd nests them.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    static_input_indices: tuple[int, ...]
    joint_inputs: Any

    def joint(self, *, compress: str | None = None) -> JointGraph:
        """Return a copy, tidied for a partitioner that compresses saved values by `compress`."""
        return joint_graph_of(
            copy_of(self.module),
            num_forward_outputs=self.num_forward_outputs,
            static_input_indices=self.static_input_indices,
            compress=compress,
        )


def capture(
    fn: Callable[..., Any],
    /,
    *args: Any,
    backend: str = "inductor",
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> tuple[CapturedGraph, ...]:
    """Return the joint graphs of `fn(*args, **kwargs)`, exactly as the partitioner of `backend` receives them.

    Nothing runs and nothing is allocated: `fuse`'s tracer gets fake copies of the arguments, of the module, and of the
    tensors and modules that a function closes over. The originals, the random state, the global settings and
    `torch.compile`'s cache for `fn` do not change.

    There is one graph for each Dynamo graph, in order of execution; a function without a graph break has one. A graph
    in which nothing requires grad has no backward and is left out: without any gradient, or under `torch.no_grad()`,
    the result is ().

    A keyword argument of `fn` named `backend` or `device` can be passed with `functools.partial`. Python
    objects other than modules, lists, tuples and dicts are not copied: if `fn` changes them, they stay changed.

    Args:
        fn: a function of tensors or a module. For a fused one, the function or module that was fused is captured.
        args: its arguments. Tensors may be real, fake, or on the meta device.
        backend: "inductor" (decomposed, after Inductor's passes over the joint graph), "triton" (the same, with this
            library's ops on a GPU), "eager" (ATen ops), or "nvfuser" (norms, softmaxes and activations decomposed).
        device: the device that stands for the meta device. Other tensors keep theirs. It must be present: autograd
            needs its stream, for fake tensors too.
        kwargs: its keyword arguments.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: an unknown backend; a device that is not present; or `fn` needs the value of a tensor between two
            graphs.

    >>> layer = torch.nn.Linear(4, 2, device="meta")
    >>> (graph,) = capture(layer, torch.randn(3, 4), backend="eager")
    >>> graph.num_forward_outputs, graph.static_input_indices
    (1, (0, 1))
    >>> [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"][:3]
    ['aten.t.default', 'aten.addmm.default', 'aten.t.default']
    """
    if not callable(fn):
        raise TypeError(f"capture takes a function or a module, got {type(fn).__name__}")
    if backend not in COMPILERS:
        raise ValueError(no_such("backend", backend, COMPILERS))
    graphs: list[CapturedGraph] = []

    def cut(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = tuple(options.get("static_lifetime_input_indices") or ())
        graphs.append(CapturedGraph(copy_of(joint_module), options["num_fwd_outputs"], static, joint_inputs))
        # Any cut will do: the forward runs on fake tensors alone, to reach the next graph.
        return default(joint_module, joint_inputs, **options)

    with fake_copies(fn, args, kwargs, device=device) as (traced_fn, fake_args, fake_kwargs, _):

        def entry(*args: Any, **kwargs: Any) -> Any:
            return traced_fn(*args, **kwargs)

        with traced_op_by_op(cut, backend=backend) as traced, explained_without_values(fn):
            traced(entry)(*fake_args, **fake_kwargs)
    return tuple(graphs)


@contextlib.contextmanager
def explained_without_values(fn: Callable[..., Any]) -> Iterator[None]:
    """Replace torch's error for the value of a fake tensor by one that names `fn`. Used by `explain` too."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{name_of(fn)} needs the value of a tensor outside any graph ({error}{_last_line(error)}), and a fake "
            "tensor has none; compute it in the graph, or capture the part before and the part after"
        ) from error


@contextlib.contextmanager
def traced_op_by_op(cut: Any, *, backend: str) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Yield a decorator for functions: their graphs are cut as `backend` would, by `cut`, and run op by op.

    The code is forgotten afterwards. Used by `compression_errors` too.
    """
    options = {} if backend == "eager" else {"op_by_op": True}

    def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = COMPILERS[backend](
            graph_module, example_inputs, partition=cut, torch_random=False, **options
        )
        return compiled

    with forget_compiled_code(compile_graph):
        yield dynamo_optimize(compile_graph)


def _last_line(error: BaseException) -> str:
    """Return the innermost line of the traceback that is neither torch's nor ours: ", file:line"."""
    traceback, last = error.__traceback__, ""
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith("torch") and module != __name__:
            last = f", {traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return last
