"""work -- what a step computes and keeps, as plain numbers. `trace` counts them, and the others only add them up.

    time of some work = matmul FLOPs / matmul rate + attention FLOPs / attention rate + bytes / bandwidth
                        + exponentials / their rate + draws / their rate + kernels x the time of starting one

It is a sum and not a maximum: a kernel is either a matrix product or moves memory, and one runs after the other.
"""

from dataclasses import dataclass, field, fields
from typing import TypeVar

T = TypeVar("T", bound="_Numbers")


@dataclass(frozen=True)
class _Numbers:
    """A dataclass of numbers, which are added, and scaled, field by field."""

    def __add__(self: T, other: T) -> T:
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __sub__(self: T, other: T) -> T:
        return self + other * -1

    def __mul__(self: T, factor: float) -> T:
        return type(self)(*(getattr(self, one.name) * factor for one in fields(self)))


@dataclass(frozen=True)
class Work(_Numbers):
    """The work of some kernels.

    Attributes:
        matmul_flops: of matrix products and convolutions, two for a multiplication and its addition.
        attention_flops: of fused attention; a causal one skips half of the scores, and counts without them.
        moved_bytes: read and written by all other kernels.
        exponentials: elements of the ops that compute an exponential or the like: exp, tanh, erf, log.
        draws: random numbers.
        kernels: how many kernels there are.

    >>> total = Work(matmul_flops=8.0) + Work(moved_bytes=2.0) * 3
    >>> total.matmul_flops, total.moved_bytes
    (8.0, 6.0)
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    exponentials: float = 0.0
    draws: float = 0.0
    kernels: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True)
class Pass(_Numbers):
    """Forward and backward of a part of a model.

    Attributes:
        saved_bytes: kept from forward to backward, without weights.
        sharded_bytes: those of them that tensor parallelism divides without sequence parallelism too.
        working_bytes: what the step needs at its peak beside the saved values, the weights and their gradients.
        forward: its work.
        backward: its work, recomputing included.
    """

    saved_bytes: float = 0.0
    sharded_bytes: float = 0.0
    working_bytes: float = 0.0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward."""
        return self.forward.flops + self.backward.flops


@dataclass(frozen=True)
class Counted:
    """A model's step, as numbers for any batch.

    Attributes:
        fixed: all but the layers, whatever the batch.
        example: all but the layers, for an example.
        layer_fixed: a layer, whatever the batch.
        layer_example: a layer, for an example.
    """

    fixed: Pass
    example: Pass
    layer_fixed: Pass
    layer_example: Pass

    def layer(self, batch: float) -> Pass:
        """One layer, for a batch."""
        return self.layer_fixed + self.layer_example * batch

    def rest(self, batch: float) -> Pass:
        """All but the layers, for a batch."""
        return self.fixed + self.example * batch

    def step(self, batch: float, *, num_layers: int) -> Pass:
        """The whole model, for a batch."""
        return self.rest(batch) + self.layer(batch) * num_layers


@dataclass(frozen=True)
class Rates:
    """How fast a device works.

    Attributes:
        matmul: FLOP/s of matrix products, in the precision of the run.
        attention: FLOP/s of fused attention.
        bandwidth: bytes/s between the device and its memory.
        exponentials: per second.
        draws: random numbers per second.
        kernel_seconds: for a kernel to start, where that is not hidden behind the kernel before it.
    """

    matmul: float
    attention: float
    bandwidth: float
    exponentials: float
    draws: float
    kernel_seconds: float


def seconds_of(work: Work, rates: Rates) -> float:
    """Return the time of some work.

    >>> seconds_of(Work(matmul_flops=6.0, moved_bytes=4.0), Rates(2.0, 1.0, 4.0, 1.0, 1.0, 0.0))
    4.0
    """
    return (
        work.matmul_flops / rates.matmul
        + work.attention_flops / rates.attention
        + work.moved_bytes / rates.bandwidth
        + work.exponentials / rates.exponentials
        + work.draws / rates.draws
        + work.kernels * rates.kernel_seconds
    )
