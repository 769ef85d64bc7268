"""communication -- what the GPUs of a training send, and how long it takes.

A ring moves, through each link and in each direction, of n GPUs and a message of S bytes

    all-gather, reduce-scatter    S (n - 1) / n
    all-reduce                    2 S (n - 1) / n       a reduce-scatter, then an all-gather

Thakur et al., "Optimization of collective communication operations in MPICH", 2005, sections 4.1, 4.4 and 4.5; NCCL's
tests count bandwidth by the same factors. Latency is a fixed time for each doubling of the group.

ddp     an all-reduce of the gradients of each layer, in float32, while backward computes the layers before it (Li et
        al., "PyTorch Distributed", 2020, section 3.2)
fsdp    an all-gather of each layer's weights before its forward and again before its backward, and a reduce-scatter of
        its gradients in float32 (Zhao et al., "PyTorch FSDP", 2023, section 3; ZeRO, 2020, section 7: with the weights
        in bfloat16 the gathers are half of what they are in float32)
tp      two all-reduces of the stream in forward, and two in backward, of each layer (Shoeybi et al., "Megatron-LM",
        2019, section 3)
tp with sequence    each of these becomes an all-gather and a reduce-scatter, which move as many bytes, and backward
        gathers the two inputs again, which are saved in parts (Korthikanti et al., 2022, section 4.2.2)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .hardware import Hardware
from .layout import Layout
from .memory import FLOAT32_BYTES
from .model import PlannedModel

_REDUCTIONS_OF_A_LAYER = 2


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind.

    Attributes:
        kind: "all-reduce", "all-gather" or "reduce-scatter".
        size: bytes of the whole message of each.
        count: how many.
        group: GPUs that take part.
        bandwidth: bytes/s of one direction that each has for it.
        latency: seconds for each doubling of the group.
    """

    kind: str
    size: float
    count: int
    group: int
    bandwidth: float
    latency: float

    @property
    def moved(self) -> float:
        """Bytes that each GPU sends, in all of them."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.count * self.size * (self.group - 1) / self.group

    @property
    def seconds(self) -> float:
        """The time of all of them, one after the other.

        >>> round(Sent("all-reduce", 8.0, 1, 4, 2.0, 0.0).seconds, 1)
        6.0
        """
        if self.group == 1:
            return 0.0
        return self.moved / self.bandwidth + self.count * self.latency * math.log2(self.group)


@dataclass(frozen=True)
class Communication:
    """The collectives of a step, by when they run.

    Attributes:
        forward: beside the forward of each layer, for all layers.
        backward: beside the backward of each layer, for all layers.
        ends: before the first layer, and after the last one: nothing is computed meanwhile.
        inside: within the layers, which wait for them.
    """

    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    ends: tuple[Sent, ...] = ()
    inside: tuple[Sent, ...] = ()

    @property
    def all(self) -> tuple[Sent, ...]:
        """All collectives of the step."""
        return (*self.forward, *self.backward, *self.ends, *self.inside)


def seconds(sent: Sequence[Sent]) -> float:
    """Return the time of collectives, one after the other."""
    return sum(one.seconds for one in sent)


def communication_of(model: PlannedModel, layout: Layout, hardware: Hardware, *, batch: float) -> Communication:
    """Return the collectives of a step of one micro-batch.

    Args:
        model: its numbers.
        layout: with its data-parallel groups counted.
        hardware: its links.
        batch: examples of a data-parallel group.
    """
    sizes, layers = model.sizes, model.sizes.num_layers
    layer, rest = sizes.layer_parameters / layout.tp, sizes.rest_parameters / layout.tp

    def across(kind: str, size: float, count: int) -> Sent:
        bandwidth = hardware.group_bandwidth(layout.dp, stride=layout.tp)
        return Sent(kind, size, count, layout.dp, bandwidth, hardware.latency)

    def within(kind: str, size: float, count: int) -> Sent:
        return Sent(kind, size, count, layout.tp, hardware.group_bandwidth(layout.tp), hardware.latency)

    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    ends: tuple[Sent, ...] = ()
    inside: tuple[Sent, ...] = ()
    if layout.dp > 1 and layout.shard == "ddp":
        backward = (across("all-reduce", FLOAT32_BYTES * layer, layers),)
        ends = (across("all-reduce", FLOAT32_BYTES * rest, 1),)
    if layout.dp > 1 and layout.shard == "fsdp":
        forward = (across("all-gather", model.itemsize * layer, layers),)
        backward = (*forward, across("reduce-scatter", FLOAT32_BYTES * layer, layers))
        ends = (across("all-gather", model.itemsize * rest, 1), across("reduce-scatter", FLOAT32_BYTES * rest, 1))
    if layout.tp > 1:
        stream, count = batch * sizes.stream_bytes, layers * _REDUCTIONS_OF_A_LAYER
        # A layer that is recomputed runs its collectives once more.
        passes = 2 + layout.recomputes_blocks
        if layout.sequence:
            gathers, scatters = (passes + 1) * count, passes * count
            inside = (within("all-gather", stream, gathers), within("reduce-scatter", stream, scatters))
        else:
            inside = (within("all-reduce", stream, passes * count),)
    return Communication(forward, backward, ends, inside)
