"""Every name of torch that is not public and that this package needs, in one place.

Checked with torch 2.11.0 and 2.13.0: the tests of every floor ran on both. Where a signature grew in between, the
difference is settled here.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch import partitioners as _partitioners
from torch._functorch._aot_autograd.utils import make_boxed_func as make_boxed_func
from torch._functorch.compile_utils import get_aten_target as overload_packet
from torch._functorch.compile_utils import raise_getitems
from torch._functorch.partitioners import classify_nodes as classify_nodes
from torch._functorch.partitioners import must_recompute as must_recompute
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch.fx.experimental.proxy_tensor import is_sym_node as is_sym_node
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

__all__ = [
    "BackendCompilerFailed",
    "CheckpointPolicy",
    "CustomPartitionerFn",
    "TorchDynamoException",
    "aot_autograd",
    "classify_nodes",
    "compile_with_inductor",
    "cpp_compiler",
    "extract_forward_and_backward",
    "is_opaque",
    "is_sym_node",
    "known_ops",
    "make_boxed_func",
    "mark_forced_saves",
    "must_recompute",
    "overload_packet",
    "size_of",
    "torch_compile",
]

known_ops = _partitioners.get_default_op_list
size_of: Callable[[fx.Node], int] = _partitioners._size_of
is_opaque: Callable[[fx.Node], bool] = getattr(_partitioners, "is_opaque_node", lambda node: False)


def mark_forced_saves(joint_module: fx.GraphModule) -> fx.GraphModule:
    """Resolve the user's checkpoint tags, and tag as must-save what must run once: collectives, effects, mutations."""
    if _partitioners.has_recomputable_ops(joint_module):
        joint_module = _partitioners.cleanup_recompute_tags(joint_module, is_default_partition=False)
    _partitioners.force_save_collectives(joint_module)
    for name in ("force_save_effectful_ops", "force_save_bw_mutation_src"):
        if hasattr(_partitioners, name):  # both came after 2.11
            getattr(_partitioners, name)(joint_module)
    return joint_module


def extract_forward_and_backward(
    joint_module: fx.GraphModule,
    saved_values: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_inputs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut the joint graph into a forward that also returns `saved_values` and a backward that takes them."""
    symbols = [node for node in saved_values if is_sym_node(node)]
    opaque = [node for node in saved_values if is_opaque(node)]
    tensors = [node for node in saved_values if node not in set(symbols) | set(opaque)]
    options: dict[str, Any] = {"saved_sym_nodes": symbols, "num_fwd_outputs": num_fwd_outputs}
    options["static_lifetime_input_nodes"] = static_inputs
    if "saved_opaque_nodes" in inspect.signature(_partitioners._extract_fwd_bwd_modules).parameters:  # from 2.12 on
        options["saved_opaque_nodes"] = opaque
    replays_random_ops = _partitioners.has_recomputable_rng_ops(joint_module)
    forward, backward = _partitioners._extract_fwd_bwd_modules(joint_module, tensors, **options)
    if replays_random_ops:
        forward, backward = _partitioners.functionalize_rng_ops(joint_module, forward, backward, len(symbols))
    backward = _partitioners.reordering_to_mimic_autograd_engine(backward)
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = _partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = _partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def compile_with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], partitioner: CustomPartitionerFn
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor and our partitioner; backward too, so that its errors show now."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        compiled = compile_fx(graph_module, list(example_inputs), config_patches={"custom_partitioner_fn": partitioner})
    return cast(Callable[..., Any], compiled)


def cpp_compiler() -> str:
    """Return the C++ compiler Inductor would use; raises RuntimeError when there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


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
