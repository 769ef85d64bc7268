"""memory -- the bytes of a training on one GPU.

    weights, gradients    float32, as `fuselayers train` keeps them          4 + 4 bytes a parameter
    AdamW                 two moments in float32                              8 bytes a parameter
    a copy                weights in bfloat16 for the products, if the run has that precision: all of them under ddp,
                          those of the layer that runs and of the next one under fsdp, with that layer's gradients
    activations           what forward saves, and what a step needs beside that at its peak

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, section 3 and 5: fsdp
is its stage 3. Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4:
tensor parallelism divides what is saved inside of attention and feedforward, sequence parallelism the rest too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .layout import Layout
from .model import PlannedModel
from .work import Pass

FLOAT32_BYTES = 4
_MOMENTS = 2


@dataclass(frozen=True)
class Memory:
    """The bytes on the GPU that has most.

    Attributes:
        weights: float32 weights.
        gradients: of them.
        optimizer: the moments of AdamW.
        copies: weights and gradients that exist for a time, in the precision of the run.
        saved: values saved for backward.
        working: what a step needs beside these at its peak.
    """

    weights: float
    gradients: float
    optimizer: float
    copies: float
    saved: float
    working: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.copies + self.saved + self.working


def parameters_of_a_rank(shapes: Sequence[tuple[int, ...]], *, dp: int, tp: int) -> int:
    """Return how many elements the first rank holds of parameters that FSDP splits along their first dimension.

    `fully_shard` splits like `torch.chunk`: the first ranks have the larger parts. Tensor parallelism divides matrices
    and leaves vectors whole.

    >>> parameters_of_a_rank([(5, 3), (4,)], dp=2, tp=1)  # 3 rows of the matrix, 2 of the vector
    11
    """
    total = 0
    for shape in shapes:
        # Which dimension tensor parallelism splits is the plan's matter; along the first one FSDP has less to split.
        rows, *rest = shape or (1,)
        if len(shape) >= 2:
            rows = math.ceil(rows / tp)
        total += math.ceil(rows / dp) * math.prod(rest)
    return total


def memory_of(model: PlannedModel, layout: Layout, *, batch: float) -> Memory:
    """Return the bytes on the first GPU.

    Args:
        model: its numbers.
        layout: with its data-parallel groups counted.
        batch: examples of a micro-batch of one data-parallel group.
    """
    sizes, tp, dp = model.sizes, layout.tp, layout.dp if layout.shard == "fsdp" else 1
    layer = parameters_of_a_rank(sizes.layer, dp=dp, tp=tp)
    rest = parameters_of_a_rank(sizes.rest, dp=dp, tp=tp)
    held = float(sizes.num_layers * layer + rest)
    if layout.shard == "fsdp":
        # Two layers are gathered at a time; the gradients of one are whole until they are reduced, in float32.
        largest = max(parameters_of_a_rank(part, dp=1, tp=tp) for part in (sizes.layer, sizes.rest))
        copies = float((2 * model.itemsize + FLOAT32_BYTES) * largest)
    else:
        copies = model.itemsize * held if model.precision == "bfloat16" else 0.0
    counted = model.counted_for(layout)
    of_layer, of_rest = counted.layer(batch), counted.rest(batch)
    saved, working = sizes.num_layers * _on_a_rank(of_layer, layout), of_rest.working_bytes / tp
    if layout.recomputes_blocks:
        # Backward of a layer begins with its forward, whose saved values exist for this layer alone.
        saved = sizes.num_layers * batch * sizes.stream_bytes / (tp if layout.sequence else 1)
        working += _on_a_rank(of_layer, layout)
    return Memory(
        weights=FLOAT32_BYTES * held,
        gradients=FLOAT32_BYTES * held,
        optimizer=_MOMENTS * FLOAT32_BYTES * held,
        copies=copies,
        saved=saved + _on_a_rank(of_rest, layout),
        working=working,
    )


def _on_a_rank(one: Pass, layout: Layout) -> float:
    if layout.sequence:
        return one.saved_bytes / layout.tp
    return one.saved_bytes - one.sharded_bytes * (1 - 1 / layout.tp)


def largest_batch(memory_for: Callable[[float], Memory], limit: float) -> int:
    """Return the largest number of examples whose memory is at most `limit`; 0 if not even one fits.

    >>> largest_batch(lambda batch: Memory(1.0, 1.0, 2.0, 0.0, 3.0 * batch, 1.0), 12.0)
    2
    """
    nothing, one = memory_for(0).total, memory_for(1).total
    if one > limit:
        return 0
    return int((limit - nothing) // (one - nothing)) if one > nothing else 1
