"""Partitioners by name. Each has AOTAutograd's signature, so it also serves as `partition_fn` outside this library."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch.fx as fx

from ...names import name_of, no_such
from ...text_table import bytes_of
from ..cut import joint_graph_of, split
from ..joint_graph import JointGraph, PartitionError
from ..passes import compress_saved_pass, compression
from .budget import limit_for_peak, saved_by_budget, split_by_budget
from .cost import CostModel
from .default import saved_by_default
from .machine import machine_of
from .min_cut import saved_by_min_cut


class Partitioner(Protocol):
    """Cuts a joint graph into a forward and a backward module.

    `joint_module` has the forward's inputs and then the outputs' gradients as placeholders, and the forward's outputs
    and then the inputs' gradients as outputs. The new forward module returns `num_fwd_outputs` outputs, then the saved
    values. The backward module takes the saved values, then the gradients.
    """

    def __call__(
        self, joint_module: fx.GraphModule, joint_inputs: Any, /, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]: ...


@dataclass(frozen=True)
class SavePolicy:
    """A partitioner of this library: a policy that decides which values are saved, and its prices.

    Call it as a partitioner, or call `saved_values` for the decision alone. As a partitioner it prices the graph for a
    fusing compiler, or with `compiler="eager"` for a graph that runs op by op.

    Args:
        name: "default", "min_cut" or "budget".
        cost: the prices; None takes those of the graph's device and of the compiler.
        limit: for "budget": bytes if it is an int, a share of what "default" saves if it is a float.
        compress: how saved values are compressed: "int8", "float8", "bfloat16", or None.
        peak: for "budget": the most bytes that forward and backward hold at once, in place of `limit`.
    """

    name: str
    cost: CostModel | None = None
    limit: int | float | None = None
    compress: str | None = None
    peak: int | None = None

    def __post_init__(self) -> None:
        compression(self.compress)  # an unknown name raises here

    def __call__(
        self,
        joint_module: fx.GraphModule,
        joint_inputs: Any = None,
        /,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        compiler: str = "inductor",
        recomputable_ops: Collection[Any] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if recomputable_ops is not None:
            raise ValueError(
                "recomputable_ops is not supported: prices decide what is recomputed; give them as "
                "SavePolicy('min_cut', cost=CostModel(...))"
            )
        joint = joint_graph_of(
            joint_module,
            num_forward_outputs=num_fwd_outputs,
            static_input_indices=static_lifetime_input_indices,
            compress=self.compress,
        )
        return self.split(joint, fused=compiler != "eager")

    def saved_values(self, joint: JointGraph, *, fused: bool) -> list[fx.Node]:
        """Return the saved values, in the order of the graph.

        Args:
            joint: the graph to cut, made for the same compression.
            fused: whether a fusing compiler compiles the two graphs; matters only if `cost` is None.

        Raises:
            PartitionError: a value can neither be saved nor recomputed, or the budget is too small.
        """
        if self.name == "default":
            return saved_by_default(joint)
        cost = self.cost or cost_model_for(joint.device_types, fused=fused)
        if self.name == "min_cut":
            return saved_by_min_cut(joint, cost=cost)
        return saved_by_budget(joint, cost=cost, limit=self._limit_of(joint, cost))

    def split(self, joint: JointGraph, *, fused: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward module with the saved values; the arguments are those of `saved_values`.

        Raises:
            PartitionError: as `saved_values`.
        """
        if self.name != "budget":
            return split(joint, self.saved_values(joint, fused=fused))
        cost = self.cost or cost_model_for(joint.device_types, fused=fused)
        return split_by_budget(joint, cost=cost, limit=self._limit_of(joint, cost))

    def _limit_of(self, joint: JointGraph, cost: CostModel) -> float:
        if self.peak is not None:
            return limit_for_peak(joint, cost=cost, peak=self.peak)
        assert self.limit is not None
        exact = replace(joint, compressed={})
        return self.limit * (exact.saved_bytes(saved_by_default(exact)) if isinstance(self.limit, float) else 1)


def cost_model_for(device_types: Iterable[str], *, fused: bool) -> CostModel:
    """Return the default prices for a graph on these devices: those of the first that is not a CPU."""
    busy = next((device for device in device_types if device not in ("cpu", "meta")), "cpu")
    # Only this device is read: reading a GPU's name initialises CUDA, and processes forked later could not use it.
    return CostModel(machine=machine_of(busy), fused=fused)


def with_prices(cut: Partitioner, device_types: Iterable[str], *, fused: bool) -> Partitioner:
    """Return a policy of this library with its prices for these devices, so that the machine is read once for a graph.

    A policy with its own prices, one that needs none, and a user's function are returned unchanged.
    """
    if not isinstance(cut, SavePolicy) or cut.cost is not None or cut.name == "default":
        return cut
    return replace(cut, cost=cost_model_for(device_types, fused=fused))


@dataclass(frozen=True)
class OwnPartitioner:
    """A user's partitioner, with a check of its results.

    Attributes:
        own: the user's function.
        compress: as in `SavePolicy`.
    """

    own: Partitioner
    compress: str | None = None

    def __post_init__(self) -> None:
        compression(self.compress)  # an unknown name raises here

    def __call__(
        self, joint_module: fx.GraphModule, joint_inputs: Any, /, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        options.pop("compiler", None)  # AOTAutograd's signature has none
        parts: Any = self.own(joint_module, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
        if isinstance(parts, tuple | list):
            kinds: Any = ["GraphModule" if isinstance(part, fx.GraphModule) else type(part).__name__ for part in parts]
        else:
            kinds = type(parts).__name__
        if kinds != ["GraphModule"] * 2:
            raise PartitionError(
                f"the partitioner {name_of(self.own)} must return two GraphModules, forward and backward, got {kinds}; "
                f"to change nothing, return min_cut(joint_module, joint_inputs, **options)"
            )
        forward, backward = parts
        inputs = forward.graph.find_nodes(op="placeholder")
        static = {inputs[index].name for index in options.get("static_lifetime_input_indices") or ()}
        return compress_saved_pass(
            forward, backward, self.compress, num_forward_outputs=num_fwd_outputs, static_inputs=static
        )


default: Final = SavePolicy("default")
"""Save what eager autograd would save, each tensor once, and no dropout mask."""

min_cut: Final = SavePolicy("min_cut")
"""Save the set of values with the lowest total price in the cost model."""


def budget(
    limit: int | float | str | None = None, *, peak: int | str | None = None, cost: CostModel | None = None
) -> SavePolicy:
    """Return a partitioner that saves at most so many bytes, and recomputes as little as possible, matmuls included.

    A larger budget can have a lower peak, since fewer recomputed values wait for their gradients at once. Then backward
    recomputes in two steps: its peak is about that of the larger budget, and it recomputes more.

    With `peak`, as many bytes are saved as possible while forward and backward never hold more than `peak` at once.

    Args:
        limit: an int is bytes, as is a text such as "200 MB"; a float above 0 and up to 1 is a share of what `default`
            saves. Each graph has its own budget; parameters, and other tensors that outlive the call, do not count.
        peak: bytes, as an int or a text such as "2 GB", in place of `limit`. Values, results and gradients count;
            inputs, parameters and the memory that an op uses inside do not.
        cost: prices other than the graph's own.

    Raises:
        ValueError: a limit or peak is not positive or not a size, or a share is above 1.
        TypeError: the limit or the peak is not a number, or both are given, or neither.
        PartitionError: (at the first call) the budget is too small for the graph; the message names the smallest.

    >>> import torch
    >>> from fuselayers.partition import fuse, saved_bytes
    >>> fused = fuse(lambda x: x.sin().cos(), backend="eager", partition=budget(0.5))
    >>> saved_bytes(fused, torch.randn(8, 16, requires_grad=True))  # by default 1024
    512
    >>> budget(1_000_000)
    SavePolicy(name='budget', cost=None, limit=1000000, compress=None, peak=None)
    >>> budget(peak="2 GB").peak
    2000000000
    """
    if (limit is None) == (peak is None):
        raise TypeError(f"a budget needs either a limit or a peak, got limit={limit!r} and peak={peak!r}")
    if peak is not None:
        peak = bytes_of(peak) if isinstance(peak, str) else peak
        if isinstance(peak, bool) or not isinstance(peak, int):
            raise TypeError(f"a peak must be an int (bytes) or a string such as '2 GB', got {peak!r}")
        if peak <= 0:
            raise ValueError(f"a peak in bytes must be above 0, got {peak}")
        return SavePolicy("budget", cost=cost, peak=peak)
    limit = bytes_of(limit) if isinstance(limit, str) else limit
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(f"a budget must be an int (bytes) or a float (a share of what 'default' saves), got {limit!r}")
    if isinstance(limit, float) and not 0 < limit <= 1:
        raise ValueError(f"a budget given as a float is a share, 0 < share <= 1, got {limit}; give bytes as an int")
    if limit <= 0:
        raise ValueError(f"a budget in bytes must be above 0, got {limit}")
    return SavePolicy("budget", cost=cost, limit=limit)


PARTITIONERS: Final[Mapping[str, SavePolicy]] = MappingProxyType({"default": default, "min_cut": min_cut})


_BUDGET: Final = "budget:"
_PEAK: Final = "peak:"


def partitioner(partition: str | Partitioner, *, compress: str | None = None) -> Partitioner:
    """Return the partitioner named `partition`. A user's function is wrapped in a check of its results.

    A budget's name holds its limit: "budget:0.5" is `budget(0.5)`, a share, "budget:200MB" is `budget("200 MB")`, and
    "budget:peak:2GB" is `budget(peak="2 GB")`.
    With `compress` its saved values are compressed: "int8", "float8" or "bfloat16".

    Raises:
        ValueError: no partitioner or no compression has that name (the message lists them), or the budget is malformed.
        TypeError: `partition` is neither a name nor callable.

    >>> partitioner("budget:0.5") == budget(0.5)
    True
    """
    if not isinstance(partition, str):
        if not callable(partition):
            raise TypeError(f"partition must be a name or a callable, got {type(partition).__name__}")
        policy = partition if isinstance(partition, SavePolicy | OwnPartitioner) else OwnPartitioner(partition)
    elif partition.startswith(_BUDGET):
        policy = _budget_called(partition)
    elif partition not in PARTITIONERS:
        raise ValueError(no_such("partitioner", partition, (*PARTITIONERS, f"{_BUDGET}0.5")))
    else:
        policy = PARTITIONERS[partition]
    return policy if compress is None else replace(policy, compress=compress)


def _budget_called(name: str) -> SavePolicy:
    text = name.removeprefix(_BUDGET)
    size = text.removeprefix(_PEAK)
    try:
        number = int(size) if size.isdecimal() else size if size.endswith("B") else float(size)
        return budget(number) if size == text else budget(peak=number)  # type: ignore[arg-type]  # no share: it raises
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} is not a budget: write budget:0.5 for a share of what 'default' saves, budget:200MB for bytes, "
            "or budget:peak:2GB for the most that forward and backward hold at once"
        ) from error
