"""Joint graphs for the partition tests, as AOTAutograd hands them to a partitioner."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fuselayers.partition.default import saved_by_default
from fuselayers.partition.joint_graph import JointGraph
from fuselayers.partition.partitioners import Partitioner, default, partitioner
from fuselayers.partition.torch_private import aot_autograd, torch_compile

__all__ = ["joint_graph_of", "saved_by_default", "split_of"]


def _run_as_it_is(graph_module: Any, example_inputs: Any) -> Any:
    return graph_module.forward


def joint_graph_of(fn: Callable[..., Any], *args: Tensor) -> JointGraph:
    """The joint graph of `fn`, not yet cut."""
    seen: list[JointGraph] = []

    def look(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        import copy

        static = options.get("static_lifetime_input_indices")
        seen.append(
            JointGraph.of(
                copy.deepcopy(joint_module),
                num_forward_outputs=options["num_fwd_outputs"],
                static_input_indices=static,
            )
        )
        return default(joint_module, joint_inputs, **options)

    _compile(fn, look, args)
    return seen[0]


def split_of(fn: Callable[..., Any], *args: Tensor, partition: str | Partitioner, fused: bool = True) -> Any:
    """The forward and the backward module that a partitioner makes of `fn`."""
    seen: list[Any] = []

    def keep(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        seen.append(partitioner(partition, fused=fused)(joint_module, joint_inputs, **options))
        return seen[-1]

    _compile(fn, keep, args)
    return seen[0]


def _compile(fn: Callable[..., Any], partition_fn: Any, args: tuple[Tensor, ...]) -> None:
    from functorch.compile import make_boxed_func

    backend = aot_autograd(
        fw_compiler=lambda graph_module, _: make_boxed_func(graph_module.forward), partition_fn=partition_fn
    )
    torch_compile(fn, backend=backend, recompile_limit=8, fullgraph=True)(*args)
