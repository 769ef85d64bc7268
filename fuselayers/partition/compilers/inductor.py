"""The Inductor compiler: C++ on the CPU, Triton on a GPU, with forward and backward cut by our partitioner."""

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from ..._torch.inductor import compile_with_inductor, cpp_compiler, has_triton, trace_with_inductor
from ..._torch.tracing import all_nodes
from ...errors import warn_once
from ...ops.implementations.own_kernels import own_kernels, takes_own_kernels
from ...ops.linear import onednn_wins
from ...sources import sources_hash
from ..choose.partitioners import Partitioner, SavePolicy, with_prices
from ..cut import before_cut, before_run, before_trace
from .cuda_graphs import with_copied_results


def why_inductor_is_unavailable(device_type: str) -> str | None:
    """Return None if Inductor can compile for `device_type` ("cpu", "cuda"), else what is missing."""
    if device_type == "cpu":
        try:
            cpp_compiler()
        except (RuntimeError, OSError):
            return "no C++ compiler was found; install g++ or set CXX"
        return None
    return None if has_triton() else f"Triton cannot compile for {device_type} here"


def compile_triton(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """As `compile_inductor`, with the kernels of this library's ops instead of code that Inductor writes for them."""
    with own_kernels():
        return compile_inductor(graph_module, example_inputs, **options)


def compile_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Partitioner,
    torch_random: bool,
    cuda_graphs: bool = False,
    op_by_op: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph, forward and backward at once. The arguments are those of `compile_eager`.

    With `op_by_op` nothing is compiled: the two graphs, as Inductor receives them, run op by op.
    """
    graph_module = before_trace(graph_module, compiler="inductor", torch_random=torch_random)
    values = (node.meta.get("example_value") for node in all_nodes(graph_module))
    device_types = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    partition = with_prices(partition, sorted(device_types), fused=True)

    def cut(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint_module = before_cut(joint_module, compiler="inductor", torch_random=torch_random)
        return partition(joint_module, joint_inputs, **options)

    if op_by_op:
        return trace_with_inductor(graph_module, example_inputs, cut)
    compile_graph = partial(
        compile_with_inductor,
        graph_module,
        example_inputs,
        cut,
        key=cache_key(partition, torch_random=torch_random),
        fallback_random=torch_random,
        last_pass=partial(before_run, compiler="inductor"),
    )
    if not cuda_graphs:
        return compile_graph()
    return with_copied_results(compile_graph(cuda_graphs=_say_no_graph))


def _say_no_graph(reason: str) -> None:
    warn_once(f"cuda_graphs=True captures no CUDA graph of a part of the model: {reason.strip().splitlines()[0]}")


def cache_key(cut: Partitioner, *, torch_random: bool) -> str:
    """Return a key for Inductor's cache: code for another partitioner or other prices is not reused.

    No text identifies the behaviour of a user's own function, so its code is not reused across processes.
    """
    if not isinstance(cut, SavePolicy):
        return str(uuid.uuid4())
    return f"{cut}-{torch_random}-{takes_own_kernels()}-{onednn_wins()}-{sources_hash()}"
