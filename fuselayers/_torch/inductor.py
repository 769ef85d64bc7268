"""inductor -- compile with Inductor, and the code that it gets for this library's ops."""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch.utils._triton import has_triton as has_triton

from .cpp_files import cpp_files
from .inductor_faults import without_faults
from .onednn import PRODUCT_OP, is_cheaper_transposed
from .tracing import all_nodes, boxed, forget_donated_buffers, may_overlap, mutated_inputs

REALIZED: Final = "inductor_realize_to_strides"
"""A key of a node's meta: Inductor writes the value to memory instead of recomputing it at each read."""


class _ForInductor:
    """A partitioner in the form that Inductor's configuration takes, with its key for Inductor's cache on disk."""

    def __init__(self, cut: Callable[..., Any], key: str | None) -> None:
        from torch._inductor.custom_graph_pass import CustomPartitionerFn

        CustomPartitionerFn.register(_ForInductor)  # a base class would have to be imported with this file
        self._cut, self._key = cut, key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._cut(gm, joint_inputs, **kwargs)

    def uuid(self) -> str | None:
        return self._key

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForInductor":
        return self  # Inductor copies its configuration

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self._key),)


def compile_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: Callable[..., Any],
    *,
    key: str,
    fallback_random: bool,
    last_pass: Callable[[fx.GraphModule], fx.GraphModule],
    cuda_graphs: Callable[[str], None] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor and our partitioner. Backward is compiled now too, so that its errors show.

    Args:
        graph_module, example_inputs: the graph, and the inputs of the first call.
        partitioner: cuts the joint graph.
        key: identifies the partitioner and the last pass in Inductor's cache.
        fallback_random: whether torch's random ops draw from torch's generator.
        last_pass: changes each graph that Inductor compiles: forward and backward after the cut, or the only one.
        cuda_graphs: if given, the code runs in CUDA graphs, and it is called with the reason where Inductor captures
            none.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_graph(graph_module: fx.GraphModule, *args: Any, **options: Any) -> Any:
        forget_donated_buffers()
        graph = graph_module.graph
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = {copy.args[0] for copy in copies}.union(mutated_inputs(graph))
        if any(may_overlap(node.meta["val"]) for node in written):
            raise NotImplementedError(
                "Inductor writes all elements of an input where the function writes some, which is wrong if elements "
                "share memory, as after expand or unfold; write to a clone() of the input"
            )
        compiled = compile_fx_inner(last_pass(graph_module), *args, **options)
        reason = getattr(compiled, "disabled_cudagraphs_reason", None)
        if cuda_graphs is not None and reason:
            cuda_graphs(str(reason))
        return compiled

    settings: dict[str, Any] = {"custom_partitioner_fn": _ForInductor(partitioner, key)}
    if fallback_random:
        # In the other layout that Inductor gives convolutions a random op would write its numbers in another order.
        settings |= {"fallback_random": True, "layout_optimization": False}
    if cuda_graphs is not None:
        settings["triton.cudagraphs"] = True
    # Precompiled headers take 6 s and 156 MB, and save 1.6 s per file. Forward and backward have one file each.
    settings["cpp_cache_precompile_headers"] = False
    if any(isinstance(value, torch.Tensor) and value.is_neg() for value in example_inputs):
        raise NotImplementedError(
            "Inductor ignores the negative bit of an input, a view such as x.conj().imag; "
            "materialise it with .resolve_neg()"
        )
    # The key of AOTAutograd's cache lacks the value of a symbolic float, so the cache would return code for another
    # value (https://github.com/pytorch/pytorch/issues/197889).
    nodes = all_nodes(graph_module)
    has_floats = any(isinstance(node.meta.get("example_value"), torch.SymFloat) for node in nodes)
    own_cache = {"enable_autograd_cache": False} if has_floats else {}
    of_autograd = {
        "force_non_lazy_backward_lowering": True,
        # Our autograd functions run no code besides the traced code. Caching saves a second process 1 s per graph.
        "autograd_cache_allow_custom_autograd_functions": True,
        **own_cache,
    }
    with cpp_files(), without_faults(), functorch_config.patch(of_autograd):
        compiled = compile_fx(graph_module, list(example_inputs), inner_compile=compile_graph, config_patches=settings)
    return cast(Callable[..., Any], compiled)


_last_of_graph: Final[weakref.WeakKeyDictionary[Any, dict[Any, Any]]] = weakref.WeakKeyDictionary()


def draw_in_inductor(op: torch._ops.OpOverload, *, lowest: int, highest: int) -> None:
    """Make Inductor's code run the calls of an op that draws a number in the graph's order.

    Each call becomes torch's own `randint_like`, with the result of the previous call on the device as argument; the
    first becomes `randint`. That saves the host a call of Python, some 10 us, and `cpp_wrapper` cannot call an op that
    takes a device, unless it is torch's. Calls in a nested graph are ordered among themselves. To save
    memory, Inductor reorders calls that do not depend on each other, even calls of random ops, which read and change
    the generator (https://github.com/pytorch/pytorch/issues/192635).

    The op's fake implementation must call this function: it runs before each lowering, when Inductor is loaded.

    Args:
        op: takes a tensor that it does not read, and the tensor's device; returns an int64 tensor of shape [].
        lowest, highest: of the numbers, highest excluded.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    # Another thread may be in the middle of the import; `fallback_handler` is defined late.
    if not hasattr(lowering, "fallback_handler") or op in lowering.lowerings:
        return
    from torch._inductor.virtualized import V

    draw = lowering.fallback_handler(torch.ops.aten.randint.low, add_to_fallback_set=False)
    draw_like = lowering.fallback_handler(torch.ops.aten.randint_like.low_dtype, add_to_fallback_set=False)

    def drawn(unread: Any, *, device: torch.device) -> Any:
        last = _last_of_graph.setdefault(V.graph, {})
        own_device = unread.get_device()  # has an index, which `device` may lack
        if own_device in last:
            last[own_device] = draw_like(last[own_device], lowest, highest)
        else:
            last[own_device] = draw(lowest, highest, [], dtype=torch.int64, device=own_device)
        return last[own_device]

    lowering.register_lowering(op, type_promotion_kind=None)(drawn)


class KernelCall(NamedTuple):
    """A launch of a Triton kernel that writes one new tensor.

    Attributes:
        kernel: the kernel; its first parameter is the new tensor, its second the op's first argument.
        grid: programs in x, y and z.
        shape, dtype: of the new tensor.
        constants: the kernel's other arguments by name.
    """

    kernel: Any
    grid: tuple[int, int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    constants: dict[str, Any]


def launch_in_inductor(op: torch._ops.OpOverload, call_of: Callable[..., KernelCall | None]) -> None:
    """Make Inductor's code launch a Triton kernel where a graph calls an op, without the host's time for the op.

    The op's fake implementation must call this function, as for `draw_in_inductor`.

    Args:
        op: its first argument is a tensor; the result is one contiguous tensor on its device.
        call_of: takes the op's arguments, with Inductor's nodes for tensors and symbols for unknown sizes. It returns
            the launch, or None if the op has to run.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if not hasattr(lowering, "fallback_handler") or op in lowering.lowerings:
        return
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    run_op = lowering.fallback_handler(op, add_to_fallback_set=False)

    def launched(first: Any, *rest: Any, **named: Any) -> Any:
        call = call_of(first, *rest)
        if call is None:
            return run_op(first, *rest, **named)
        result = lowering.empty(list(call.shape), dtype=call.dtype, device=first.get_device())
        names = call.kernel.arg_names
        lowering.lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(call.kernel),
            constant_args_idx=kernel_side_table.add_constant_args(call.constants),
            grid=[call.grid],
            tma_descriptor_metadata={},
            kwargs={names[0]: result, names[1]: first},
        )
        return result

    lowering.register_lowering(op, type_promotion_kind=None)(launched)


def product_in_inductor(op: torch._ops.OpOverload) -> None:
    """Make Inductor's code call oneDNN where a graph calls an op, without the host's time for an op in Python, 10 us.

    The op's fake implementation must call this function, as for `draw_in_inductor`. Inductor's own lowering of oneDNN's
    op is not used: it copies operands that are not contiguous.

    Args:
        op: (a [M, K], b [K, N], bias [N] or None) -> a @ b + bias.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if not hasattr(lowering, "fallback_handler") or op in lowering.lowerings:
        return
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    run_onednn = lowering.fallback_handler(getattr(torch.ops.mkldnn, PRODUCT_OP).default, add_to_fallback_set=False)

    def transpose(x: Any) -> Any:
        return lowering.lowerings[torch.ops.aten.permute](x, [1, 0])

    def multiplied(a: Any, b: Any, bias: Any) -> Any:
        if V.graph.cpp_wrapper:  # C++ cannot call oneDNN's op
            aten = torch.ops.aten
            return lowering.lowerings[aten.mm](a, b) if bias is None else lowering.lowerings[aten.addmm](bias, a, b)
        # The op copies an `a` that is not contiguous, on one thread; Inductor's code for the copy uses all of them.
        contiguous = ir.ExternKernel.require_contiguous
        # Inductor may change the layout that was checked: it writes a part of a `cat` into the whole.
        nodes: Any = V.graph.current_node.args[:2]
        traced_a, traced_b = (node.meta["val"] for node in nodes)
        if bias is None and is_cheaper_transposed(traced_a, traced_b):
            a = ir.ExternKernel.require_exact_strides(a, traced_a.stride())
            return contiguous(transpose(run_onednn(contiguous(transpose(b)), a, None, "none", [], "")))
        b = ir.ExternKernel.require_exact_strides(b, traced_b.stride())
        bias = None if bias is None else contiguous(bias)
        return run_onednn(contiguous(a), transpose(b), bias, "none", [], "")

    lowering.register_lowering(op, type_promotion_kind=None)(multiplied)


def cpp_compiler() -> str:
    """Return the C++ compiler that Inductor uses; raises RuntimeError if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def trace_with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], partitioner: Callable[..., Any]
) -> Callable[..., Any]:
    """Run Inductor's passes on a Dynamo graph up to the partitioner; the two graphs run op by op."""
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    def run(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        return boxed(graph_module)

    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
    ):
        settings = {"custom_partitioner_fn": _ForInductor(partitioner, None)}
        compiled = compile_fx(graph_module, list(example_inputs), inner_compile=run, config_patches=settings)
    return cast(Callable[..., Any], compiled)
