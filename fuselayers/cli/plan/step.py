"""Computes the cost of a training step for one GPU of a layout: memory, communication and time.

docs/scale.md states the model: the bytes of each part, the collectives of each layout, and their sources. Collectives
of ddp and fsdp overlap with the computation; those of tensor parallelism do not.
"""

from dataclasses import dataclass, replace
from typing import Final

from ...configs import ParallelConfig
from ...hardware import Machine
from ...names import shown
from ...ops.linear_cross_entropy.chunks import LOGITS_AT_ONCE, chunk_rows
from ...partition import partitioner
from .model import PlannedModel

# An assumption: the driver, the communication library and fragmentation take the rest.
USABLE: Final = 0.92
GPUS_OF_A_NODE: Final = 8
_PEERS: Final = GPUS_OF_A_NODE - 1
# All-gather 361 and reduce-scatter 363 of 450 GB/s: Bekman, "Machine Learning Engineering", network,
# github.com/stas00/ml-engineering at 744d01e.
_LINK_SHARE: Final = 0.8
# AdamW reads weight, gradient and two moments and writes three of them; clipping reads the gradient for its norm, and
# reads and writes it to scale it.
_PASSES_OF_UPDATE: Final = 7 + 3
_BATCHES: Final = (1, 2, 4, 8, 16, 32)  # a larger one does not use a GPU better
_FLOAT32: Final = 4


def gpu_layout(parallel: ParallelConfig, *, gpus: int) -> ParallelConfig:
    """Return a config's section `parallel` with its number of groups; several groups without a `shard` use FSDP.

    Raises:
        ValueError: it does not fit the number of GPUs, or its budget is no share.
    """
    if parallel.budget is not None and not isinstance(getattr(partitioner(parallel.budget), "limit", None), float):
        raise ValueError(
            f"parallel.checkpointing is a number of bytes, {shown(parallel.budget)}; a plan takes a share, such as "
            "budget:0.5"
        )
    tp, dp = parallel.tp, parallel.dp or gpus // parallel.tp
    if dp * tp != gpus:
        wanted = f"parallel.dp={dp} x parallel.tp={tp}" if parallel.dp else f"parallel.tp={tp}"
        raise ValueError(
            f"gpus={gpus} does not fit {wanted}; set parallel.tp to a divisor of gpus, and leave parallel.dp out"
        )
    shard = "none" if dp == 1 and parallel.shard == "ddp" else parallel.shard
    if shard == "ddp" and tp > 1:
        raise ValueError(
            f"parallel.shard=ddp cannot hold weights that parallel.tp={tp} divides; set parallel.shard=fsdp"
        )
    return replace(parallel, dp=dp, shard="fsdp" if dp > 1 and shard == "none" else shard)


def layout_text(layout: ParallelConfig) -> str:
    """Return a layout in a few words."""
    tensor = f", tp {layout.tp}{' + sequence' if layout.sequence else ''}" if layout.tp > 1 else ""
    checkpointing = "" if layout.checkpointing == "none" else f", checkpointing {layout.checkpointing}"
    return f"dp {layout.dp} {layout.shard}{tensor}{checkpointing}"


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU; docs/scale.md explains each."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """The sum. It is a little too high: the logits and a recomputed block are not alive at the same time."""
        return self.weights + self.gradients + self.optimizer + self.copies + self.activations + self.logits


def memory_of(model: PlannedModel, layout: ParallelConfig, *, batch: int) -> StepMemory:
    """Return the bytes on one GPU, for a micro-batch of `batch` examples in each data-parallel group."""
    tp, sharded = layout.tp, layout.shard == "fsdp"
    held = model.parameters / tp / (layout.dp if sharded else 1)
    low_precision = model.itemsize if model.itemsize < _FLOAT32 else 0
    gathered = (2 * model.itemsize + _FLOAT32) * model.largest_unit / tp
    kept, recomputed = model.kept, model.run.largest if model.kept.repeated_flops else 0.0
    saved = kept.saved / tp if layout.sequence else kept.saved - kept.inside * (1 - 1 / tp)
    tokens = batch * model.tokens
    if model.vocabulary and model.fused_loss:
        rows = chunk_rows(tokens, model.width, model.vocabulary, at_once=LOGITS_AT_ONCE // model.itemsize)
        logits = 2 * model.itemsize * rows * model.vocabulary + _FLOAT32 * model.width * model.vocabulary
    else:
        logits = (model.itemsize + 2 * _FLOAT32) * tokens * model.vocabulary
    return StepMemory(
        weights=_FLOAT32 * held,
        gradients=_FLOAT32 * held,
        optimizer=2 * _FLOAT32 * held,
        copies=gathered if sharded else low_precision * held,
        activations=batch * (saved + recomputed / tp),
        logits=logits / tp,
    )


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in a step.

    Attributes:
        kind: "all-reduce", "all-gather" or "reduce-scatter".
        size: bytes of the whole messages.
        group: GPUs that take part.
        within: whether the group is a tensor-parallel one. Its GPUs wait for the collective.
    """

    kind: str
    size: float
    group: int
    within: bool = False

    @property
    def moved(self) -> float:
        """Bytes that each GPU sends."""
        return (2 if self.kind == "all-reduce" else 1) * self.size * (self.group - 1) / self.group


def collectives_of(model: PlannedModel, layout: ParallelConfig, *, batch: int) -> tuple[Sent, ...]:
    """Return the collectives of a step."""
    sent: list[Sent] = []
    weights = model.parameters / layout.tp
    if layout.shard == "ddp":
        sent.append(Sent("all-reduce", _FLOAT32 * weights, layout.dp))
    if layout.shard == "fsdp":
        sent.append(Sent("all-gather", 2 * model.itemsize * weights, layout.dp))
        sent.append(Sent("reduce-scatter", _FLOAT32 * weights, layout.dp))
    if layout.tp > 1:
        # Two per block in forward, two in backward, and two in a repeated forward.
        stream, passes = 2 * batch * model.stream, 2 + bool(model.kept.repeated_flops)
        if layout.sequence:
            sent.append(Sent("all-gather", (passes + 1) * stream, layout.tp, within=True))
            sent.append(Sent("reduce-scatter", passes * stream, layout.tp, within=True))
        else:
            sent.append(Sent("all-reduce", passes * stream, layout.tp, within=True))
    return tuple(sent)


def link_bandwidth(gpu: Machine, size: int, *, stride: int = 1) -> float:
    """Return the bytes/s in one direction that each GPU of a group has for a ring.

    Across nodes, a group uses the network adapters of all its members in a node. In a mesh a GPU has a link to each
    other GPU of its node, and a group uses the links between its members.

    Args:
        size: GPUs of the group.
        stride: the distance between neighbours in the group: for a data-parallel group the size of a tensor-parallel
            one.
    """
    if size * stride <= GPUS_OF_A_NODE:
        return _LINK_SHARE * gpu.link * (size - 1 if gpu.mesh else _PEERS) / _PEERS
    return _LINK_SHARE * min(gpu.link, max(GPUS_OF_A_NODE // stride, 1) * gpu.network)


@dataclass(frozen=True)
class StepPlan:
    """The costs of a layout.

    Attributes:
        batch: examples of a micro-batch of one data-parallel group.
        memory: of one GPU.
        collectives: of a step.
        compute_seconds: for FLOPs and bytes.
        exposed_seconds: for collectives that no computation hides.
        tokens_per_second: of one GPU.
        utilisation: the model's FLOPs over those that the GPU could do at its peak.
    """

    batch: int
    memory: StepMemory
    collectives: tuple[Sent, ...]
    compute_seconds: float
    exposed_seconds: float
    tokens_per_second: float
    utilisation: float

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.compute_seconds + self.exposed_seconds


def plan_of(
    model: PlannedModel, gpu: Machine, layout: ParallelConfig, *, batch: int | None = None, efficiency: float
) -> StepPlan:
    """Return the plan of a layout.

    Args:
        batch: examples of a micro-batch of a data-parallel group; None for the largest power of two that fits, up
            to 32.
        efficiency: the share of the GPU's rates that the step keeps.

    Raises:
        ValueError: `tp` does not divide the heads, or the plan does not fit into the memory; the text says what to
            change.
    """
    tp = layout.tp
    for heads, kind in zip(model.heads, ("heads", "key-value heads"), strict=True):
        if tp > 1 and (not heads or heads % tp):
            raise ValueError(f"parallel.tp={tp} must divide the {kind} of the attention, which has {heads or 'none'}")
    usable = USABLE * gpu.memory
    memories = {size: memory_of(model, layout, batch=size) for size in ([batch] if batch else _BATCHES)}
    fitting = [size for size, memory in memories.items() if memory.total <= usable]
    if not fitting:
        batch, memory = next(iter(memories.items()))
        parts = ", ".join(f"{part} {size / 1e9:,.1f} GB" for part, size in vars(memory).items())
        raise ValueError(
            f"{model.name} does not fit with {layout_text(layout)} and a batch of {batch}: it needs "
            f"{memory.total / 1e9:,.1f} GB on each GPU, and {gpu.name} has {usable / 1e9:,.1f} GB to use ({parts}); "
            "lower batch, set parallel.checkpointing=block or parallel.tp, or use more GPUs"
        )
    batch = fitting[-1]
    memory = memories[batch]
    collectives = collectives_of(model, layout, batch=batch)
    peak = gpu.low_precision_flop_rate if model.itemsize < _FLOAT32 else gpu.flop_rate
    flops = batch * (model.flops + model.kept.repeated_flops) / tp
    moved = 2 * batch * model.run.saved / tp + _PASSES_OF_UPDATE * memory.weights
    compute = (flops / peak + moved / gpu.bandwidth) / efficiency
    waits = sum(message.moved for message in collectives if message.within) / link_bandwidth(gpu, tp)
    beside = sum(message.moved for message in collectives if not message.within) / link_bandwidth(
        gpu, layout.dp, stride=tp
    )
    exposed = waits + max(beside - compute, 0.0)
    per_second = batch / tp / (compute + exposed)
    return StepPlan(
        batch=batch,
        memory=memory,
        collectives=collectives,
        compute_seconds=compute,
        exposed_seconds=exposed,
        tokens_per_second=per_second * model.tokens,
        utilisation=per_second * model.flops / peak,
    )
