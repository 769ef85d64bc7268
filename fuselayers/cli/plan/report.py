"""report -- a plan as lines of at most 80 columns, and as plain Python for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from ..parser import folded
from ..text import print_table, say
from .communication import Communication
from .hardware import Hardware
from .model import PlannedModel
from .search import USABLE, Plan
from .trace import EAGER, SELECTIVE

_WIDTH: Final = 80


def print_model(console: Console, model: PlannedModel) -> None:
    """Print what does not depend on the layout: parameters, FLOPs, and what each way to save takes."""
    sizes = model.sizes
    say(
        console,
        f"{model.name}: {sizes.parameters:,} parameters, {sizes.num_layers} layers, {model.precision}",
        f"an example has {model.tokens:,} tokens; its step takes {amount(model.model_flops, 'FLOP')}, "
        f"{amount(model.model_flops / model.tokens, 'FLOP')} a token",
        "",
    )
    rows = savings(model)
    print_table(
        console,
        [
            {
                "saved by": name,
                "bytes": amount(saved, "B"),
                "of eager": f"{saved / rows[EAGER][0]:.2f} x",
                "a layer": amount(layer, "B"),
                "FLOPs repeated": f"{max(again, 0.0):.1%}",
            }
            for name, (saved, layer, again) in rows.items()
        ],
        title="activations of an example",
    )
    say(console, "")


def savings(model: PlannedModel) -> dict[str, tuple[float, float, float]]:
    """Return, for each way to save, the bytes of the model and of a layer, and the FLOPs that are repeated as a share.

    All are of an example.
    """
    layers, stream, least = model.sizes.num_layers, model.sizes.stream_bytes, model.flops(EAGER)
    rows = {}
    for kind, counted in model.counted.items():
        name = kind if kind in (EAGER, SELECTIVE) else f"fuse, {kind}"
        saved, layer = counted.step(1, num_layers=layers).saved_bytes, counted.layer(1).saved_bytes
        rows[name] = (saved, layer, model.flops(kind) / least - 1)
    rest = model.counted[model.run_kind].rest(1).saved_bytes
    rows["block"] = (rest + layers * stream, stream, model.block_flops / least - 1)
    return rows


def print_plans(console: Console, plans: Sequence[Plan], hardware: Hardware, *, gpus: int) -> None:
    """Print a line for each plan."""
    rows = [
        {
            "layout": str(plan.layout).replace("checkpointing ", ""),
            "batch": f"{plan.batch}",
            "GB": f"{plan.memory.total / 1e9:.1f}",
            "step": duration(plan.time.total),
            "tokens/s/GPU": f"{plan.tokens_per_second:,.0f}",
            "MFU": f"{plan.utilisation:.0%}",
        }
        for plan in plans
    ]
    print_table(console, rows, title=f"{gpus} x {hardware.name}, {USABLE:.0%} of {hardware.memory / 1e9:.0f} GB to use")
    say(console, "")


def print_details(console: Console, plan: Plan) -> None:
    """Print the parts of one plan."""
    time = plan.time
    say(console, f"{plan.layout}, batch {plan.batch}; the largest that fits is {plan.largest_batch}", bold=True)
    lines = {
        "memory of a GPU": {
            "AdamW" if part == "optimizer" else part: amount(size, "B") for part, size in asdict(plan.memory).items()
        },
        "sent by a GPU": sent(plan.communication),
        "time of a step": {
            "forward": duration(time.forward),
            "backward": duration(time.backward),
            "update": duration(time.update),
            "waiting for links": duration(time.exposed),
            "links hidden": duration(time.hidden),
        },
    }
    for title, parts in lines.items():
        text = ", ".join(f"{name} {value}" for name, value in parts.items()) or "nothing"
        say(console, *folded(f"{title}: {text}", _WIDTH, hanging=2))


def sent(communication: Communication) -> dict[str, str]:
    """Return the bytes of a step by collective."""
    totals: dict[str, float] = {}
    for one in communication.all:
        totals[one.kind] = totals.get(one.kind, 0.0) + one.moved
    return {kind: amount(size, "B") for kind, size in totals.items()}


def as_dict(model: PlannedModel, plans: Sequence[Plan], hardware: Hardware, *, gpus: int) -> dict[str, Any]:
    """Return all figures in bytes, seconds, FLOPs, and tokens per second."""
    return {
        "model": model.name,
        "parameters": model.sizes.parameters,
        "layers": model.sizes.num_layers,
        "tokens": model.tokens,
        "precision": model.precision,
        "flops_per_example": model.model_flops,
        "activations": {
            name: {"bytes": saved, "layer_bytes": layer, "flops_repeated": again}
            for name, (saved, layer, again) in savings(model).items()
        },
        "hardware": asdict(hardware),
        "gpus": gpus,
        "plans": [
            {
                **asdict(plan),
                "memory": {**asdict(plan.memory), "total": plan.memory.total},
                "time": {**asdict(plan.time), "total": plan.time.total},
            }
            for plan in plans
        ],
    }


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
