"""search -- the plan of a layout, and the layouts that are worth trying."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from .communication import Communication, communication_of
from .hardware import Hardware
from .layout import Layout, fitted
from .memory import Memory, largest_batch, memory_of
from .model import PlannedModel
from .step_time import StepTime, step_time

# The rest is the driver's and the communication library's, and what the allocator cannot use. Assumed.
USABLE: Final = 0.92
# A larger batch makes no GPU busier.
_LARGEST_BATCH: Final = 32


@dataclass(frozen=True)
class Plan:
    """A layout and its costs.

    Attributes:
        layout: with its data-parallel groups counted.
        batch: examples of a micro-batch of one data-parallel group.
        largest_batch: the largest that fits; 0 if none does.
        memory: of the GPU that has most.
        communication: of a step.
        time: of a step.
        tokens_per_second: of one GPU.
        utilisation: the model's FLOPs over those that the GPU could do at its peak.
    """

    layout: Layout
    batch: int
    largest_batch: int
    memory: Memory
    communication: Communication
    time: StepTime
    tokens_per_second: float
    utilisation: float


def plan_of(model: PlannedModel, hardware: Hardware, layout: Layout, *, gpus: int, batch: int | None) -> Plan:
    """Return the plan of one layout.

    Args:
        model: its numbers.
        hardware: each GPU.
        layout: as asked for.
        gpus: all of them.
        batch: examples of a micro-batch of a data-parallel group; None for the largest power of two that fits, at most
            32.

    Raises:
        ValueError: the model or the number of GPUs does not allow the layout.
    """
    layout = fitted(layout, gpus=gpus, heads=model.heads, kv_heads=model.kv_heads)
    most = largest_batch(lambda examples: memory_of(model, layout, batch=examples), USABLE * hardware.memory)
    if batch is None:
        batch = 1 << (min(max(most, 1), _LARGEST_BATCH).bit_length() - 1)
    memory = memory_of(model, layout, batch=batch)
    communication = communication_of(model, layout, hardware, batch=batch)
    time = step_time(model, layout, communication, memory, hardware.rates(model.precision), batch=batch)
    per_second = batch / layout.tp / time.total
    return Plan(
        layout=layout,
        batch=batch,
        largest_batch=most,
        memory=memory,
        communication=communication,
        time=time,
        tokens_per_second=per_second * model.tokens,
        utilisation=per_second * model.model_flops / hardware.peak(model.precision),
    )


def candidates(model: PlannedModel, hardware: Hardware, *, gpus: int) -> list[Layout]:
    """Return the layouts that are worth trying: tensor parallelism within a node, with sequence parallelism, and each
    way to shard and to checkpoint."""
    layouts = []
    for tp in (1, 2, 4, 8):
        if tp > min(gpus, hardware.gpus_per_node):
            continue
        # DistributedDataParallel does not hold weights that tensor parallelism has divided.
        shards = ("ddp", "fsdp") if tp == 1 else ("fsdp",)
        for shard in shards if gpus > tp else ("none",):
            for checkpointing in ("none", "selective", "block"):
                layout = Layout(tp=tp, sequence=tp > 1, shard=shard, checkpointing=checkpointing)
                try:
                    layouts.append(fitted(layout, gpus=gpus, heads=model.heads, kv_heads=model.kv_heads))
                except ValueError:  # heads or GPUs that do not divide
                    continue
    return layouts


def best_plans(
    model: PlannedModel, hardware: Hardware, *, gpus: int, batch: int | None, budget: str | None = None
) -> list[Plan]:
    """Return the plans that fit, the fastest first.

    Args:
        budget: a partitioner's budget that takes the place of other checkpointing; None tries them.

    Raises:
        ValueError: nothing fits; the text says what comes closest.
    """
    layouts = candidates(model, hardware, gpus=gpus)
    if budget is not None:
        layouts = [replace(one, checkpointing=budget) for one in layouts if one.checkpointing == "none"]
    plans = [plan_of(model, hardware, layout, gpus=gpus, batch=batch) for layout in layouts]
    fitting = [plan for plan in plans if fits(plan, hardware)]
    if not fitting:
        raise ValueError(too_large(model, hardware, min(plans, key=lambda plan: plan.memory.total)))
    return sorted(fitting, key=lambda plan: -plan.tokens_per_second)


def fits(plan: Plan, hardware: Hardware) -> bool:
    """Whether the GPU's memory is enough."""
    return plan.memory.total <= USABLE * hardware.memory


def too_large(model: PlannedModel, hardware: Hardware, plan: Plan) -> str:
    """Return the text of the error: by how much it does not fit, and what to change."""
    memory, usable = plan.memory, USABLE * hardware.memory
    states = memory.weights + memory.gradients + memory.optimizer + memory.copies
    parts = {"weights, gradients and AdamW": states, "saved values": memory.saved, "working memory": memory.working}
    advice = _advice(plan, states, usable)
    return (
        f"{model.name} does not fit with {plan.layout} and a batch of {plan.batch}: it needs {_gb(memory.total)} on "
        f"each GPU, and {hardware.name} has {_gb(usable)} to use, {_gb(memory.total - usable)} too few ("
        + ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
        + f"); {' or '.join(advice)}"
    )


def _advice(plan: Plan, states: float, usable: float) -> Sequence[str]:
    layout = plan.layout
    advice = [f"set batch={plan.largest_batch}"] if plan.largest_batch else []
    if layout.checkpointing == "none" and states < usable:
        advice.append("set parallel.checkpointing=block")
    if layout.shard != "fsdp" and layout.dp > 1:
        advice.append("set parallel.shard=fsdp")
    elif layout.tp < 8:
        advice.append(f"set parallel.tp={2 * layout.tp}")
    return [*advice, "take more GPUs"]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
