"""capture -- the joint graphs of a function, as a backend's partitioner receives them, and nothing run to get them.

Everything happens on fake tensors, which have a shape, a dtype and a device, but no memory. So a graph costs neither
the model's bytes nor its time, and there can be one of a model that is larger than the machine.
"""

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx

from .._torch.dispatch import DataDependentOutputException, DynamicOutputShapeException
from .._torch.guards import dynamo_optimize, dynamo_state_kept
from .._torch.tracing import aot_autograd, copy_of, make_boxed_func, trace_with_inductor
from ..names import no_such
from .compilers.nvfuser import nvfuser_decompositions, with_masks_for_nvfuser
from .fake_twins import fake_twins
from .partitioners import default
from .passes import dropout_in_place_pass, seeded_dropout_calls_pass, seeded_dropout_pass

__all__ = ["ROOT", "CapturedGraph", "Trace", "capture", "compile_functional", "trace"]


@dataclass(frozen=True)
class CapturedGraph:
    """One joint forward and backward graph, before anything cut it.

    Attributes:
        module: the joint graph; its placeholders are the forward's inputs, then the gradients of the outputs.
        num_forward_outputs: how many of its outputs are the forward's; the others are gradients.
        static_input_indices: which of the forward's inputs outlive the call anyway, such as parameters.
        joint_inputs: what the partitioner was given to run the graph on: fake tensors, in AOTAutograd's nesting.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    static_input_indices: tuple[int, ...]
    joint_inputs: Any


@dataclass(frozen=True)
class Trace:
    """One Dynamo graph with the joint graph made of it.

    Attributes:
        graph: the joint graph.
        inputs: what the Dynamo graph was called with: fake twins, in the order of the forward's inputs.
        sources: for each input, the expression with which Dynamo reaches it from `ROOT`, `args` and `kwargs`.
        outputs: what the Dynamo graph returned.
        fn: the fake twin that was traced.
        args: the fake twins of the arguments.
        kwargs: the fake twins of the keyword arguments.
        result: what the function returned, in the end.
    """

    graph: CapturedGraph
    inputs: tuple[Any, ...]
    sources: tuple[str, ...]
    outputs: tuple[Any, ...]
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


ROOT: Final = "L['traced_fn']"
"""What the traced function is called in Dynamo's sources."""


def capture(
    fn: Callable[..., Any],
    /,
    *args: Any,
    backend: str = "inductor",
    fullgraph: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> tuple[CapturedGraph, ...]:
    """Return the joint graphs of `fn(*args, **kwargs)`, exactly as the partitioner of `backend` would receive them.

    Nothing runs and nothing is allocated: the function is traced, as `fuse` traces it, with fake twins of its
    arguments, of the module, and of the tensors and modules that a function closes over. The originals stay as they
    are, and so do the random state, the global settings, and what `torch.compile` knows of `fn`.

    There is one graph for each graph of Dynamo, in the order in which they are met; a function without a graph break
    has one. A graph in which nothing requires grad has no backward, no partitioner ever sees it, and it is left out:
    without any gradient, or under `torch.no_grad()`, the result is ().

    A keyword argument of `fn` that is called `backend`, `fullgraph` or `device` can be passed with
    `functools.partial`. Python objects other than modules, lists, tuples and dicts are not copied: what `fn` does to
    them in Python while it is traced, it does to them.

    Args:
        fn: a function of tensors or a module; a fused one is traced as what it fuses.
        args: its arguments. Tensors may be real, fake, or on the meta device.
        backend: "inductor" (decomposed, after Inductor's own passes over the joint graph), which is "triton" too,
            "eager" (ATen ops), or "nvfuser" (norms, softmaxes and activations decomposed).
        fullgraph: True raises Dynamo's error where it would split the function in several graphs.
        device: the device that meta tensors are taken to be on. Other tensors are where they are. It must be present:
            autograd asks the device for its stream, for fake tensors too.
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
    if backend not in _BACKENDS:
        raise ValueError(no_such("backend", backend, tuple(_BACKENDS)))
    traces = trace(fn, args, kwargs, compiler=_BACKENDS[backend], fullgraph=fullgraph, device=device)
    return tuple(one.graph for one in traces)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    compiler: Callable[[fx.GraphModule, Sequence[Any], "_Capture"], Callable[..., Any]],
    fullgraph: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[Trace, ...]:
    """`capture`, with where each input of a graph came from; `joint_graph` and `operator_map` are made of it."""
    with fake_twins(fn, args, kwargs, device=device) as (traced_fn, fake_args, fake_kwargs, _):
        graphs: list[dict[str, Any]] = []

        def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
            origins = [node.meta["grapharg"] for node in placeholders]
            partitioner = _Capture()
            compiled = compiler(graph_module, example_inputs, partitioner)
            if partitioner.captured is None:
                return compiled
            seen = {
                "graph": partitioner.captured,
                "outputs": (),
                "inputs": tuple(one.example if one.is_tensor else None for one in origins),
                "sources": tuple(
                    one.source.name if isinstance(one.source.name, str) else one.source.name() for one in origins
                ),
            }
            graphs.append(seen)

            def run(*inputs: Any) -> Any:
                outputs = compiled(*inputs)
                seen["outputs"] = tuple(outputs)
                return outputs

            return run

        def entry(*args: Any, **kwargs: Any) -> Any:
            return traced_fn(*args, **kwargs)

        with dynamo_state_kept(backend):
            compiled = dynamo_optimize(backend, nopython=fullgraph)(_with_code_of_its_own(entry))
            try:
                result = compiled(*fake_args, **fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"{_name(fn)} needs the value of a tensor outside of any graph ({error}{_last_line(error)}), and a "
                    "fake tensor has none; compute it in the graph, or capture the part before and the part after"
                ) from error
    return tuple(Trace(**seen, fn=traced_fn, args=fake_args, kwargs=fake_kwargs, result=result) for seen in graphs)


class _Capture:
    """A partitioner that keeps a copy of what it is given."""

    captured: CapturedGraph | None = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        num_forward_outputs, static = options["num_fwd_outputs"], options.get("static_lifetime_input_indices")
        self.captured = CapturedGraph(copy_of(gm), num_forward_outputs, tuple(static or ()), joint_inputs)
        # How it is cut does not matter: the parts only run on fake tensors, to get to the next graph.
        forward, backward = default(
            gm, joint_inputs, num_fwd_outputs=num_forward_outputs, static_lifetime_input_indices=static
        )
        return forward, backward

    def uuid(self) -> None:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Capture":
        return self  # the configuration that holds it is copied


def compile_functional(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], partitioner: "_Capture"
) -> Callable[..., Any]:
    """As the eager backend, but what is written to an input is an output of the graph, not an op in it."""
    backend = aot_autograd(fw_compiler=_run_as_it_is, partition_fn=partitioner)
    compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    return compiled


def _compile_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], partitioner: "_Capture"
) -> Callable[..., Any]:
    def partition_fn(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        return partitioner(seeded_dropout_pass(joint_module), joint_inputs, **options)

    backend = aot_autograd(fw_compiler=_run_as_it_is, partition_fn=partition_fn, keep_inference_input_mutations=True)
    compiled: Callable[..., Any] = backend(dropout_in_place_pass(graph_module), example_inputs)
    return compiled


def _compile_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], partitioner: "_Capture"
) -> Callable[..., Any]:
    graph_module = seeded_dropout_calls_pass(dropout_in_place_pass(graph_module))
    return trace_with_inductor(graph_module, example_inputs, partitioner, run=_run_as_it_is)


def _compile_nvfuser(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], partitioner: "_Capture"
) -> Callable[..., Any]:
    def partition_fn(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        return partitioner(seeded_dropout_pass(joint_module), joint_inputs, **options)

    backend = aot_autograd(
        fw_compiler=_run_as_it_is,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
        decompositions=dict(nvfuser_decompositions()),
    )
    compiled: Callable[..., Any] = backend(with_masks_for_nvfuser(graph_module), example_inputs)
    return compiled


def _run_as_it_is(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = make_boxed_func(graph_module.forward)
    return run


_BACKENDS: Final = types.MappingProxyType(
    {
        "eager": _compile_eager,
        "inductor": _compile_inductor,
        "triton": _compile_inductor,
        "nvfuser": _compile_nvfuser,
    }
)


def _with_code_of_its_own(fn: Any) -> types.FunctionType:
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _last_line(error: BaseException) -> str:
    """Where, in code that is neither torch's nor ours, the error came from."""
    place, last = error.__traceback__, ""
    while place is not None:
        module = str(place.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith("torch") and module != __name__:
            last = f", {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
        place = place.tb_next
    return last
