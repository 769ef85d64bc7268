"""report -- a plan as lines as wide as the terminal, and as plain Python for JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Console

from ...hardware import Machine
from ..parser import folded
from ..text import line_width, say
from .model import PlannedModel
from .step import USABLE, StepPlan

_WIDTH = 80  # in a pipe or a file


def print_model(console: Console, model: PlannedModel) -> None:
    """Print what does not depend on the layout."""
    precision = "bfloat16" if model.itemsize == 2 else "float32"
    _say(
        console,
        f"{model.name}: {model.parameters:,} parameters, {model.blocks} blocks, {precision}",
        f"an example has {model.tokens:,} tokens; its step takes {amount(model.flops, 'FLOP')}, "
        f"{amount(model.flops / model.tokens, 'FLOP')} a token",
        f"blocks keep {amount(model.kept.saved, 'B')} of an example; backward repeats "
        f"{model.kept.repeated_flops / model.flops:.1%} of the FLOPs",
    )


def print_plan(console: Console, gpu: Machine, plan: StepPlan, *, gpus: int) -> None:
    """Print the costs of a step."""
    usable = amount(USABLE * gpu.memory, "B")
    memory = ", ".join(f"{part} {amount(size, 'B')}" for part, size in vars(plan.memory).items())
    sent = (
        ", ".join(f"{collective.kind} {amount(collective.moved, 'B')}" for collective in plan.collectives) or "nothing"
    )
    _say(
        console,
        "",
        f"{gpus} x {gpu.name}: {plan.layout}, batch {plan.batch}",
        f"memory of a GPU: {amount(plan.memory.total, 'B')} of {usable} to use: {memory}",
        f"sent by a GPU: {sent}",
        f"time of a step, at {plan.efficiency:.0%} of the GPU's rates: {duration(plan.seconds)}, "
        f"{duration(plan.exposed_seconds)} of it waiting for links",
        f"{plan.tokens_per_second:,.0f} tokens/s on each GPU, {plan.utilisation:.0%} model FLOPs utilisation",
    )


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        say(console, *(folded(line, line_width(console) or _WIDTH, hanging=2) or [""]))


def as_dict(model: PlannedModel, gpu: Machine, plan: StepPlan) -> dict[str, Any]:
    """Return all figures in bytes, seconds, FLOPs, and tokens per second."""
    collectives = [{**asdict(collective), "moved": collective.moved} for collective in plan.collectives]
    figures = {**asdict(plan), "collectives": collectives, "seconds": plan.seconds}
    figures["memory"]["total"] = plan.memory.total
    return {"model": asdict(model), "gpu": asdict(gpu), "plan": figures}


def amount(value: float, unit: str) -> str:
    """Return a number with a unit of thousands.

    >>> amount(1.5e9, "B"), amount(12.0, "FLOP")
    ('1.5 GB', '12.0 FLOP')
    """
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:,.1f} {prefix}{unit}"
    return f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a time.

    >>> duration(0.0123), duration(2.5)
    ('12.3 ms', '2.50 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
