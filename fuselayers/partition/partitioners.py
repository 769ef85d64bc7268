"""Partitioners by name. Each has AOTAutograd's signature, so it also serves as `partition_fn` outside this library."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch.fx as fx

from ..names import no_such
from .cost import CostModel
from .default import saved_by_default
from .joint_graph import JointGraph
from .min_cut import saved_by_min_cut

__all__ = ["PARTITIONERS", "Partitioner", "default", "min_cut", "partitioner"]


class Partitioner(Protocol):
    """Cuts a joint graph into a forward and a backward module.

    `joint_module` has the forward's inputs and then the outputs' gradients as placeholders, and the forward's outputs
    and then the inputs' gradients as outputs. The forward module returned gives `num_fwd_outputs` outputs followed by
    the saved values; the backward module takes the saved values followed by the gradients.
    """

    def __call__(
        self, joint_module: fx.GraphModule, joint_inputs: Any, /, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]: ...


def default(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    /,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Save what eager autograd would save, each tensor once, and no dropout mask."""
    joint = JointGraph.of(
        joint_module, num_forward_outputs=num_fwd_outputs, static_input_indices=static_lifetime_input_indices
    )
    return joint.split(saved_by_default(joint))


def min_cut(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    /,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    cost: CostModel = CostModel(),  # noqa: B008 (frozen)
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Save what is cheapest under `cost`, all told; no matmul, attention or random draw runs twice."""
    joint = JointGraph.of(
        joint_module, num_forward_outputs=num_fwd_outputs, static_input_indices=static_lifetime_input_indices
    )
    return joint.split(saved_by_min_cut(joint, cost=cost))


PARTITIONERS: Final[Mapping[str, Callable[..., tuple[fx.GraphModule, fx.GraphModule]]]] = MappingProxyType(
    {"default": default, "min_cut": min_cut}
)


def partitioner(partition: str | Partitioner, *, fused: bool) -> Partitioner:
    """Return the partitioner called `partition`, with the cost model of a fusing compiler or of one that runs op by op.

    Raises:
        ValueError: no partitioner has that name; the message lists what there is.
        TypeError: `partition` is neither a name nor callable.
    """
    if not isinstance(partition, str):
        if not callable(partition):
            raise TypeError(f"partition must be a name or a callable, got {type(partition).__name__}")
        return partition
    if partition not in PARTITIONERS:
        raise ValueError(no_such("partitioner", partition, PARTITIONERS))
    if partition == "min_cut":
        return functools.partial(min_cut, cost=CostModel(fused=fused))
    return PARTITIONERS[partition]
