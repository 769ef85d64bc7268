"""The Inductor compiler: C++ on the CPU, Triton on a GPU, with forward and backward cut by our partitioner."""

import uuid
from collections.abc import Callable, Collection, Sequence
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
from ..choose.machine import machine_of
from ..choose.partitioners import Partitioner, SavePolicy
from ..passes import (
    attention_calls_pass,
    onednn_products_pass,
    ops_of_calls_pass,
    plain_dropout_calls_pass,
    replayed_dropout_pass,
    seeded_dropout_calls_pass,
)
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
    """Compile a Dynamo graph, forward and backward at once. The arguments are those of `compile_ahead_of_time`.

    With `op_by_op` nothing is compiled: the two graphs, as Inductor receives them, run op by op.
    """
    graph_module = attention_calls_pass(plain_dropout_calls_pass(graph_module), torch_random=torch_random)
    if not torch_random:
        graph_module = seeded_dropout_calls_pass(graph_module)
    if takes_own_kernels():
        graph_module = ops_of_calls_pass(graph_module)

    def cut(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        # Without `torch_random` the graph already has seeded masks.
        return partition(replayed_dropout_pass(joint_module) if torch_random else joint_module, joint_inputs, **options)

    if op_by_op:
        return trace_with_inductor(graph_module, example_inputs, cut)
    values = (node.meta.get("example_value") for node in all_nodes(graph_module))
    device_types = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    key = cache_key(partition, device_types, torch_random=torch_random)
    compile_graph = partial(
        compile_with_inductor,
        graph_module,
        example_inputs,
        cut,
        key=key,
        fallback_random=torch_random,
        last_pass=onednn_products_pass,
    )
    if not cuda_graphs:
        return compile_graph()
    return with_copied_results(compile_graph(cuda_graphs=_say_no_graph))


def _say_no_graph(reason: str) -> None:
    warn_once(f"cuda_graphs=True captures no CUDA graph of a part of the model: {reason.strip().splitlines()[0]}")


def cache_key(cut: Partitioner, device_types: Collection[str], *, torch_random: bool) -> str:
    """Return a key for Inductor's cache: code for another partitioner, other prices or another machine is not reused.

    No text identifies the behaviour of a user's own function, so its code is not reused across processes.
    """
    if not isinstance(cut, SavePolicy):
        return str(uuid.uuid4())
    # A GPU's name is read only if the graph is on a GPU: reading it initialises CUDA, and processes forked later could
    # not use CUDA.
    machines = [machine_of(device_type) for device_type in sorted(device_types)]
    return f"{cut}-{torch_random}-{takes_own_kernels()}-{onednn_wins()}-{machines}-{sources_hash()}"
