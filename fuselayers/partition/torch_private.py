"""Every name of torch that is not public and that this package needs, in one place.

Checked with torch 2.11.0 and 2.13.0: the tests of every floor ran on both. Where a signature grew in between, the
difference is settled here.
"""

import collections
import contextlib
import copy
import functools
import importlib.metadata
import inspect
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import torch
import torch.fx as fx
from torch._decomp import get_decompositions
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame as dynamo_eval_frame
from torch._dynamo import optimize as dynamo_optimize
from torch._dynamo import pgo as dynamo_pgo
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import Unsupported as GraphBreak
from torch._dynamo.exc import exceptions_allowed_to_be_fallback as GRAPH_BREAKS_OF_BACKENDS
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.source import ConstantSource as ConstantSource
from torch._dynamo.utils import CleanupManager
from torch._functorch import config as functorch_config
from torch._functorch import partitioners as _partitioners
from torch._functorch._aot_autograd import descriptors as descriptors
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch._aot_autograd.utils import make_boxed_func as make_boxed_func
from torch._functorch.compile_utils import get_aten_target as overload_packet
from torch._functorch.partitioners import classify_nodes as classify_nodes
from torch._functorch.partitioners import must_recompute as must_recompute
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import symbolic_shapes as symbolic_shapes
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node as is_sym_node
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

__all__ = [
    "GRAPH_BREAKS_OF_BACKENDS",
    "NO_BACKWARD",
    "SWITCHES_OF_MODES",
    "WRITTEN_DOWN",
    "AsOnGPU",
    "BackendCompilerFailed",
    "CheckpointPolicy",
    "ConstantSource",
    "CustomPartitionerFn",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GraphBreak",
    "TorchDispatchMode",
    "TorchDynamoException",
    "all_nodes",
    "aot_autograd",
    "apply_plainly",
    "as_a_compiler",
    "classify_nodes",
    "compile_lock",
    "compile_one_graph",
    "compile_with_inductor",
    "compiler_version",
    "copy_of",
    "cpp_compiler",
    "current_device",
    "decompositions_of",
    "descriptors",
    "direct_call",
    "disable_current_modes",
    "donates_buffers",
    "dynamo_optimize",
    "dynamo_state_kept",
    "empty_strided_on",
    "extract_forward_and_backward",
    "forget_donated_buffers",
    "forward_inputs",
    "functorch_config",
    "has_storage",
    "hooks_for_saved_tensors",
    "inductor_compilers",
    "is_any_autocast_enabled",
    "is_compiling",
    "is_effect",
    "is_fwd_grad_enabled",
    "is_gradient_input",
    "is_of_a_transform",
    "is_opaque",
    "is_sym_node",
    "is_tagged_backward",
    "is_watched",
    "known_ops",
    "make_boxed_func",
    "make_fx",
    "mark_boxed",
    "may_run_again",
    "must_recompute",
    "mutated_inputs",
    "overload_packet",
    "placement",
    "pytree",
    "size_hint",
    "size_of",
    "statically_known_true",
    "symbolic_shapes",
    "tensors_like",
    "torch_compile",
    "torch_default_partition",
    "torch_min_cut_at_budget",
    "torch_min_cut_partition",
    "trace_with_inductor",
    "tree_flatten_with_path",
]

_is_primal: Callable[[fx.Node], bool] = getattr(_partitioners, "_is_primal")  # noqa: B009 (not exported)
_is_fwd_seed_offset: Callable[[fx.Node], bool] = getattr(_partitioners, "_is_fwd_seed_offset")  # noqa: B009
known_ops = functools.cache(_partitioners.get_default_op_list)
size_of: Callable[[fx.Node], int] = _partitioners._size_of
_hint: Callable[..., int] = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "hint_int")  # noqa: B009 (its name before 2.13)
torch_default_partition = _partitioners.default_partition
torch_min_cut_partition = _partitioners.min_cut_rematerialization_partition
_is_opaque: Callable[[fx.Node], bool] = getattr(_partitioners, "is_opaque_node", lambda node: False)  # from 2.12 on

WRITTEN_DOWN: Final = "inductor_realize_to_strides"
"""In a node's meta: Inductor writes the value to memory, instead of computing it wherever it is read."""


def is_opaque(node: fx.Node) -> bool:
    """True for what is handed on as it is, and costs nothing to keep: a device mesh, a script object, the state that
    compiled autograd passes to hooks."""
    return _is_opaque(node) or isinstance(node.meta.get("val"), BackwardState | FakeScriptObject)


def mutated_inputs(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The placeholders that forward overwrites: by a copy in the graph, or through AOTAutograd once it has run."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {node.args[0] for node in copies if placement(node) != "must_be_in_backward"}
    described = pytree.tree_leaves(graph.output_node().meta.get("desc"))
    inputs = [output.mutated_input for output in described if isinstance(output, InputMutationAOTOutput)]
    written.update(node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in inputs)
    return tuple(node for node in graph.find_nodes(op="placeholder") if node in written)


def donates_buffers() -> bool:
    """True if a compiled backward may reuse the memory of saved tensors, which torch's own cache key does not hold."""
    return bool(functorch_config.donated_buffer)


def forget_donated_buffers() -> None:
    """Tell AOTAutograd that the backward being compiled reuses none of the saved tensors' memory, so that it may run
    twice (`retain_graph=True`)."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None and context.fw_metadata.bw_donated_idxs:
        context.fw_metadata.bw_donated_idxs.clear()


def size_hint(size: "int | torch.SymInt") -> int:
    """The number that a symbolic size was traced with; 4096 where no number is known, as in torch's partitioners."""
    return size if isinstance(size, int) else _hint(size, fallback=4096)


def copy_of(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A deep copy, but for the tensors that the graph holds: under a fake mode they cannot be copied, and nobody writes
    to them. Without what torch says to itself about its own tree specifications while it copies them."""
    held = [value for value in vars(graph_module).values() if isinstance(value, torch.Tensor)]
    held += [*graph_module.parameters(), *graph_module.buffers()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(graph_module, {id(tensor): tensor for tensor in held})


def direct_call(target: Any) -> Callable[..., Any]:
    """What an op of a graph calls in C++, without the Python method around it; the target itself if it is no op."""
    # Not for subclasses: those of TorchBind objects look at their arguments first.
    return target._op if type(target) is torch._ops.OpOverload else target


def mark_boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that `run` takes its arguments as one list, and frees them as it goes."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def torch_min_cut_at_budget(
    joint_module: fx.GraphModule, share: float, *, num_fwd_outputs: int, static_lifetime_input_indices: list[int]
) -> list[fx.Node]:
    """What PyTorch's partitioner saves of a joint graph under `activation_memory_budget=share`, 0 to 1."""
    info = classify_nodes(joint_module, static_lifetime_input_indices, num_fwd_outputs)
    # The distance from backward, which its heuristics look at.
    for node in reversed(joint_module.graph.nodes):
        if node.op == "output" or info.is_required_fw(node):
            distances = [user.dist_from_bw + 1 for user in node.users if node.op != "output"]
            node.dist_from_bw = min([int(1e9), *distances])
        else:
            node.dist_from_bw = 0
    with functorch_config.patch(activation_memory_budget=share):
        chosen = _partitioners.choose_saved_values_set(joint_module.graph, info, memory_budget=share)
    return list(chosen)


def forward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders that forward takes: its inputs, then the random state that AOTAutograd may add."""
    placeholders = graph.find_nodes(op="placeholder")
    own = [node for node in placeholders if _is_primal(node)]
    return own + [node for node in placeholders if _is_fwd_seed_offset(node)]


def placement(node: fx.Node) -> str | None:
    """Where AOTAutograd says the node belongs: "is_forward", "is_backward", "must_be_in_forward", ..."""
    tag = node.meta.get("partitioner_tag")
    return None if tag is None else str(tag)


def is_tagged_backward(node: fx.Node) -> bool:
    """True if the node was traced while autograd ran backward."""
    tag = placement(node)
    # What Dynamo traced of an `autograd.Function`'s backward gets no tag; all of forward has one by then.
    return tag in ("is_backward", "must_be_in_backward") or (tag is None and "seq_nr" in node.meta)


def is_effect(node: fx.Node) -> bool:
    """True for the higher-order op that wraps an op with a side effect (printing, saving to disk) and orders it."""
    return node.target is torch.ops.higher_order.with_effects


def is_gradient_input(node: fx.Node) -> bool:
    """True for a placeholder through which an output's gradient comes in."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def extract_forward_and_backward(
    joint_module: fx.GraphModule,
    saved_values: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_inputs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut the joint graph into a forward that also returns `saved_values` and a backward that takes them."""
    symbols = [node for node in saved_values if is_sym_node(node)]
    # torch sorts script objects and the state for hooks out of the tensors by itself.
    opaque = [node for node in saved_values if _is_opaque(node)]
    others = {*symbols, *opaque}
    tensors = [node for node in saved_values if node not in others]
    options: dict[str, Any] = {"saved_sym_nodes": symbols, "num_fwd_outputs": num_fwd_outputs}
    options["static_lifetime_input_nodes"] = static_inputs
    if "saved_opaque_nodes" in inspect.signature(_partitioners._extract_fwd_bwd_modules).parameters:  # from 2.12 on
        options["saved_opaque_nodes"] = opaque
    replays_random_ops = _partitioners.has_recomputable_rng_ops(joint_module)
    # Lazy: their Python code is written when somebody wants it, not once for every pass that follows. On 8,000 nodes
    # that is half of the time it takes to cut them.
    with _use_lazy_graph_module(True):
        forward, backward = _partitioners._extract_fwd_bwd_modules(joint_module, tensors, **options)
    if replays_random_ops:
        forward, backward = _partitioners.functionalize_rng_ops(joint_module, forward, backward, len(symbols))
    forward = _partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = _partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def compile_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    *,
    fallback_random: bool,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor and our partitioner; backward too, so that its errors show now."""
    from torch._inductor.compile_fx import compile_fx

    settings: dict[str, Any] = {"custom_partitioner_fn": partitioner}
    if fallback_random:
        settings["fallback_random"] = True
    if any(isinstance(one, torch.Tensor) and one.is_neg() for one in example_inputs):
        raise NotImplementedError(
            "Inductor reads memory as it lies, and an input is a view that stands for its negative; "
            "write it out with .resolve_neg()"
        )
    # AOTAutograd's cache does not tell the numbers apart that such a symbol stands for, and hands out an old one's code
    # (https://github.com/pytorch/pytorch/issues/197889).
    nodes = all_nodes(graph_module)
    has_floats = any(isinstance(node.meta.get("example_value"), torch.SymFloat) for node in nodes)
    own_cache = {"enable_autograd_cache": False} if has_floats else {}
    with functorch_config.patch({"force_non_lazy_backward_lowering": True, **own_cache}):
        compiled = compile_fx(graph_module, list(example_inputs), config_patches=settings)
    return cast(Callable[..., Any], compiled)


def decompositions_of(ops: Sequence[torch._ops.OpOverloadPacket]) -> dict[Any, Callable[..., Any]]:
    """torch's own formulas for these ops, in simpler ones, by overload. Used by the nvFuser compiler."""
    return dict(get_decompositions(ops))


def compile_one_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile one graph of ATen ops with Inductor, as a compiler for AOTAutograd; it draws torch's random numbers."""
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    mode = torch._guards.detect_fake_mode(example_inputs) or FakeTensorMode()
    inputs = [
        mode.from_tensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else value
        for value in example_inputs
    ]
    # What turns torch's random ops into Inductor's runs before the graph is cut, so here they must stay torch's.
    with inductor_config.patch(fallback_random=True):
        with mode, torch.no_grad():
            lowered = make_fx(graph_module, decomposition_table=select_decomp_table())(*inputs)
        output = lowered.graph.output_node()
        # Whatever it returns keeps its strides: AOTAutograd and the other graph have been told of them.
        returned = enumerate(cast(Sequence[Any], output.args[0]))
        output.meta["user_visible_output_idxs"] = [place for place, node in returned if isinstance(node, fx.Node)]
        return cast(Callable[[list[Any]], Any], compile_fx_inner(lowered, inputs))


def cpp_compiler() -> str:
    """Return the C++ compiler Inductor would use; raises RuntimeError when there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


@functools.cache
def compiler_version(device_type: str) -> str:
    """The version of what Inductor's code is compiled with: the C++ compiler, or Triton."""
    if device_type != "cpu":
        try:
            return f"triton {importlib.metadata.version('triton')}"
        except importlib.metadata.PackageNotFoundError:
            return "no triton"
    from torch._inductor.cpp_builder import get_compiler_version_info

    try:
        said = get_compiler_version_info(cpp_compiler())
    except (RuntimeError, OSError):
        return "no C++ compiler"
    version = re.search(r"(gcc|clang) version [\d.]+", said)
    return version[0] if version else "another C++ compiler"


def torch_compile(fn: Callable[..., Any], *, recompile_limit: int, **options: Any) -> Callable[..., Any]:
    """`torch.compile` with a recompile limit of its own, also before 2.13, where the limit is a global setting."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = recompile_limit
        return torch.compile(fn, **options)
    compiled = torch.compile(fn, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        with dynamo_config.patch(recompile_limit=recompile_limit):
            return compiled(*args, **kwargs)

    return call


@contextlib.contextmanager
def dynamo_state_kept(backend: Any) -> Iterator[None]:
    """Forget, at the end, all that Dynamo learnt meanwhile.

    A function that is inlined leaves no trace, but after a graph break each called function is compiled for itself:
    its code then has a graph of `backend`, which counts towards the limit of graphs, and its sizes are remembered, so
    that the next ones would be symbolic.
    """
    compiled: list[tuple[types.CodeType, types.CodeType]] = []
    hook = register_bytecode_hook(lambda code, new_code: compiled.append((code, new_code)))
    sizes_seen = dynamo_pgo._CODE_STATE
    dynamo_pgo._CODE_STATE = collections.defaultdict(dynamo_pgo.CodeState)
    limits = {"recompile_limit": 1 << 30, "accumulated_recompile_limit": 1 << 30}
    try:
        with dynamo_config.patch(limits), torch.compiler.set_stance("default"):
            yield
    finally:
        hook.remove()
        dynamo_pgo._CODE_STATE = sizes_seen
        dynamo_eval_frame.cached_backends.pop(id(backend), None)
        for code, new_code in compiled:
            _forget(code, backend)
            if new_code in CleanupManager.instance:  # what it put among the globals of the function
                CleanupManager.instance._remove_id(id(new_code))


def _forget(code: types.CodeType, backend: Any) -> None:
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if entry.backend is backend]
    if len(ours) == len(entries):
        torch._C._dynamo.eval_frame.reset_code(code)
        return
    for entry in ours:  # beside graphs of the user's own, which stay
        state = getattr(entry.guard_manager, "extra_state", None)
        if state is not None:
            state.invalidate(entry, DeletedGuardManagerWrapper("fuselayers.partition.capture is done"))


def trace_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    *,
    run: Callable[..., Callable[..., Any]],
) -> Callable[..., Any]:
    """Take a Dynamo graph through Inductor up to the partitioner; the parts go to `run`, nothing is compiled."""
    from torch._inductor import config as inductor_config

    compile_fx, _ = inductor_compilers()
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
    ):
        compiled: Any = compile_fx(
            graph_module,
            list(example_inputs),
            inner_compile=cast(Any, run),
            config_patches={"custom_partitioner_fn": partitioner},
        )
    return cast(Callable[..., Any], compiled)


def inductor_compilers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return Inductor's compilers of a whole graph and of one without autograd; importing them takes a while."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx, compile_fx_inner


@contextlib.contextmanager
def as_a_compiler() -> Iterator[None]:
    """Be to other threads what a compiling Dynamo is: what FX sets for the whole process while it traces makes a
    compiled function raise, unless somebody says that this is compiling."""
    global _says_compiling
    with compile_lock:
        before = torch.compiler._is_compiling_flag, _says_compiling
        torch.compiler._is_compiling_flag, _says_compiling = True, threading.get_ident()
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag, _says_compiling = before


_says_compiling: int | None = None


def is_compiling() -> bool:
    """`torch.compiler.is_compiling()`, but not because `as_a_compiler` says so in another thread: a call that takes
    another form while some thread compiles could differ from what its checkpoint, or its backward, counts on."""
    return torch.compiler.is_dynamo_compiling() or (
        torch.compiler._is_compiling_flag and _says_compiling in (None, threading.get_ident())
    )


def transforms_are_active() -> bool:
    """True inside `torch.vmap`, `torch.func.grad` and their kin, and in forward mode, `torch.autograd.forward_ad`.

    Used by the ops, whose own forms know none of them.
    """
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def dispatch_mode_is_active() -> bool:
    """True under a TorchDispatchMode, which watches what is called. Used by the ops' choice."""
    return _get_current_dispatch_mode() is not None


def all_nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph, and of those within it."""
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


# What Dynamo's graphs call to switch gradients off or on, and to enter autocast.
SWITCHES_OF_MODES: Final = frozenset({torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast})


def is_watched() -> bool:
    """True where something but autograd has to see what is called of torch: a mode, a transform, a profiler, a trace.

    Used by the ops, which can do without torch's dispatcher elsewhere. A default device is a mode too, which sees
    nothing of ops that say where their tensors are.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(_BEFORE_DISPATCH)
        or (torch._C._len_torch_function_stack() > 0 and _is_watched_by_a_function_mode())
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def _is_watched_by_a_function_mode() -> bool:
    places = range(torch._C._len_torch_function_stack())
    return not all(type(torch._C._get_function_stack_at(place)) is DeviceContext for place in places)


# Of modes that trace before torch dispatches, as torch.export does. Their number would be asked for in Python.
_BEFORE_DISPATCH: Final = torch._C.DispatchKey.PreDispatch


def empty_strided_on(device_type: str) -> Callable[..., torch.Tensor]:
    """Return what makes a tensor on the current device of a type, from size, strides and dtype. Used by replay.

    Inductor's code makes its tensors with it, in half the time of `torch.empty_strided`.
    """
    makes: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}")
    return makes


def tensors_like(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return what says whether as many tensors are like these, each another object. Used by replay.

    Alike are class, dtype, device, sizes, strides, whether a gradient is needed, and the keys that torch dispatches on,
    of the tensors and of the thread: that autocast is on is one of them, its dtype is not. Dynamo's guards ask it, in
    C++ (4 tensors, one core of a Xeon: 0.4 us, for which Python takes 2).
    """
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check


def apply_plainly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without what it does for transforms of `torch.func` (one core of a Xeon: 4 us for 6)."""
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return plain


# Unlike torch.cuda's it does not see to it each time that CUDA has started, as it has where a tensor is on a GPU.
current_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
has_storage: Final[Callable[[torch.Tensor], bool]] = torch._C._has_storage
# Also of a transform that is over, of which a tensor was kept.
is_of_a_transform: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_functorch_wrapped_tensor
is_any_autocast_enabled: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled

# With True: the hooks that what autograd saves goes through, or None; and False within the forward of an
# autograd.Function, or in inference mode. Every call of the fusion core asks: Python's own functions would take longer.
hooks_for_saved_tensors: Final[Callable[[bool], object]] = torch._C._autograd._top_saved_tensors_default_hooks
is_fwd_grad_enabled: Final[Callable[[], bool]] = torch._C._is_fwd_grad_enabled
# The number of the backward that this thread is in.
current_backward: Final[Callable[[], int]] = torch._C._current_graph_task_id
NO_BACKWARD: Final = -1


def saved_tensors_hooks_are_active() -> bool:
    """True where what autograd saves goes through hooks, as under `torch.utils.checkpoint`. Used by what chooses."""
    return hooks_for_saved_tensors(True) is not None


def may_run_again() -> bool:
    """True where backward may run forward once more, and where it does: under hooks for saved tensors, as of
    `torch.utils.checkpoint`, in the forward of an autograd.Function, as its reentrant form is, and in a backward.

    Used by `fuse`: both have to go the same way."""
    return (
        hooks_for_saved_tensors(True) is not None
        or current_backward() != NO_BACKWARD
        or not (is_fwd_grad_enabled() or torch.is_inference_mode_enabled())
    )


def tangents_are_active() -> bool:
    """True in forward mode, `torch.autograd.forward_ad` and `torch.func.jvp`. Used by `fuse`."""
    return forward_ad._current_level >= 0


class AsOnGPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, the ops of a namespace do with any tensors what they do with those of a GPU. Used by the ops, to see
    on meta tensors which kernels they would launch."""

    def __init__(self, namespace: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prefix = f"{namespace}::"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith(self.prefix) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs or {})
        return func(*args, **kwargs or {})
