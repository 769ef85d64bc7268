"""step_time -- the time of a training step, from the work, the rates and the collectives.

    forward     layers x max(compute of a layer, its gathers)      + the rest
    backward    layers x max(compute of a layer, its collectives)  + the rest
    then        clipping and AdamW, which read and write weights, gradients and moments
    and         collectives within layers, and those before the first layer and after the last one

A layer's gathers and reductions are assumed to overlap with the computation of its neighbour, without slowing it down.
The collectives of tensor parallelism do not overlap, nor do the first and the last ones of a step. A kernel starts
while the one before runs, so its start costs next to nothing.
"""

from dataclasses import dataclass, replace
from typing import Final

from .communication import Communication, seconds
from .layout import Layout
from .memory import Memory
from .model import PlannedModel
from .work import Pass, Rates, Work, seconds_of

# AdamW reads weight, gradient and two moments and writes three of them; clipping reads the gradient for its norm, and
# reads and writes it to scale it. In parts of four bytes.
_PASSES_OF_UPDATE: Final = 7 + 3


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    Attributes:
        forward: computing.
        backward: computing, recomputing included.
        update: clipping and AdamW.
        exposed: collectives that no computation hides.
        hidden: collectives beside which something is computed; not part of the step.
    """

    forward: float
    backward: float
    update: float
    exposed: float
    hidden: float

    @property
    def total(self) -> float:
        """The time of the step."""
        return self.forward + self.backward + self.update + self.exposed


def update_work(memory: Memory) -> Work:
    """Return the work of clipping and AdamW on the weights of one GPU.

    >>> update_work(Memory(8.0, 8.0, 16.0, 0.0, 0.0, 0.0)).moved_bytes
    80.0
    """
    return Work(moved_bytes=_PASSES_OF_UPDATE * memory.weights)


def step_time(
    model: PlannedModel, layout: Layout, communication: Communication, memory: Memory, rates: Rates, *, batch: float
) -> StepTime:
    """Return the time of a step of one micro-batch; the arguments are as for `memory_of` and `communication_of`."""
    counted, num_layers = model.counted_for(layout), model.sizes.num_layers
    layer, rest = counted.layer(batch), counted.rest(batch)
    forward, backward, rest_forward, rest_backward = (
        seconds_of(_of_a_rank(work, one, layout), rates)
        for one in (layer, rest)
        for work in (one.forward, one.backward)
    )
    forward, backward = num_layers * forward, num_layers * (backward + forward * layout.recomputes_blocks)
    beside_forward, beside_backward = seconds(communication.forward), seconds(communication.backward)
    exposed = max(beside_forward - forward, 0.0) + max(beside_backward - backward, 0.0)
    return StepTime(
        forward=forward + rest_forward,
        backward=backward + rest_backward,
        update=seconds_of(update_work(memory), rates),
        exposed=exposed + seconds(communication.ends) + seconds(communication.inside),
        hidden=beside_forward + beside_backward - exposed,
    )


def _of_a_rank(work: Work, one: Pass, layout: Layout) -> Work:
    """Return the part of some work of a pass that one GPU of a tensor-parallel group does.

    Of the bytes moved without sequence parallelism, the share is divided that is divided of the saved values.
    """
    share = 1 / layout.tp
    inside = one.sharded_bytes / one.saved_bytes if one.saved_bytes and not layout.sequence else 1.0
    moved = work.moved_bytes * (1 - inside + inside * share)
    return replace(work * share, moved_bytes=moved, kernels=work.kernels)
