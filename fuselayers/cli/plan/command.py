"""`fuselayers plan`: its arguments and its output."""

import argparse
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from ...configs import compose
from ...configs.build import split_source
from ...hardware import GPUS, Machine
from ...names import no_such, shown
from ...text_table import amount
from ..parser import add_imports
from ..text import say
from .model import planned_model
from .step import USABLE, gpu_layout, layout_text, plan_of

DESCRIPTION = """\
Computes the cost of a training step on GPUs that you need not have: memory, FLOPs, what the GPUs send, and time.
Nothing runs.

  fuselayers plan model=llama3_8b gpus=8
  fuselayers plan model=llama3_8b gpus=512 gpu=h200 parallel.checkpointing=budget:0.3
  fuselayers plan model=llama3_8b gpus=64 parallel.tp=8 parallel.sequence=true parallel.checkpointing=block batch=4

gpus= is the number of GPUs, gpu= their kind, batch= the examples of each data-parallel group in a step (default: the
largest power of two that fits, up to 32), efficiency= the share of the GPU's rates that a step reaches. Groups without
parallel.shard use FSDP. Products run in bfloat16 unless train.precision=float32."""

# Chosen so that some published runs are faster than planned and some slower (tests/cli/plan/test_published.py). All
# other GPUs take the H100's.
_EFFICIENCY: Final = {"A100": 0.7}
_EFFICIENCY_OF_OTHERS: Final = 0.46


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the GPUs and the layout."""
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="MODEL | FILE | OVERRIDE",
        help="model=llama3_8b, gpus=8, gpu=h100, parallel.tp=2, and overrides of the config",
    )
    add_imports(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Plan and print.

    Raises:
        ValueError: an argument is invalid, or the layout does not fit; the text says what to change.
    """
    words, options = read_arguments(arguments.overrides)
    source, overrides = split_source(words)
    config = compose(source or "gpt_nano", ["train.precision=bfloat16", *overrides])
    name = next((word.partition("=")[2] for word in overrides if word.startswith("model=")), config.model.name)
    gpus, gpu = options.get("gpus", 1), options.get("gpu", GPUS["H100"])
    layout, efficiency = gpu_layout(config.parallel, gpus=gpus), options.get("efficiency", efficiency_of(gpu.name))
    with console.status("counting the model"):
        model = planned_model(config, name=name)
    plan = plan_of(model, gpu, layout, batch=options.get("batch"), efficiency=efficiency)
    memory = ", ".join(f"{part} {amount(size, 'B')}" for part, size in vars(plan.memory).items())
    sent = ", ".join(f"{message.kind} {amount(message.moved, 'B')}" for message in plan.collectives) or "nothing"
    say(
        console,
        f"{model.name}: {model.parameters:,} parameters, {model.blocks} blocks, "
        f"{'bfloat16' if model.itemsize == 2 else 'float32'}",
        f"an example has {model.tokens:,} tokens; its step takes {amount(model.flops, 'FLOP')}, "
        f"{amount(model.flops / model.tokens, 'FLOP')} a token",
        f"blocks keep {amount(model.kept.saved, 'B')} of an example; backward repeats "
        f"{model.kept.repeated_flops / model.flops:.1%} of the FLOPs",
        "",
        f"{gpus} x {gpu.name}: {layout_text(layout)}, batch {plan.batch}",
        f"memory of a GPU: {amount(plan.memory.total, 'B')} of {amount(USABLE * gpu.memory, 'B')} to use: {memory}",
        f"sent by a GPU: {sent}",
        f"time of a step, at {efficiency:.0%} of the GPU's rates: {1e3 * plan.seconds:,.1f} ms, "
        f"{1e3 * plan.exposed_seconds:,.1f} ms of it waiting for links",
        f"{plan.tokens_per_second:,.0f} tokens/s on each GPU, {plan.utilisation:.0%} model FLOPs utilisation",
    )
    return 0


def efficiency_of(gpu: str) -> float:
    """Return the default share of a GPU's peak rates that a step reaches."""
    return _EFFICIENCY.get(gpu, _EFFICIENCY_OF_OTHERS)


def read_arguments(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides of the config among the words, and the values of the options of the plan.

    Raises:
        ValueError: a value is invalid.
    """
    overrides: list[str] = []
    options: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key == "train.batch_size":
            raise ValueError("train.batch_size counts all data-parallel groups; set batch=, the examples of each group")
        if key in ("gpus", "batch"):
            options[key] = _whole(key, value)
        elif key == "gpu":
            options[key] = _gpu(value)
        elif key == "efficiency":
            options[key] = _share(value)
        else:
            overrides.append(word)
    return overrides, options


def _gpu(value: str) -> Machine:
    gpus = {name.lower().replace(" ", "_"): machine for name, machine in GPUS.items()}
    if value not in gpus:
        raise ValueError(no_such("gpu", value, gpus))
    return gpus[value]


def _whole(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, got {shown(value)}")
    return int(value)


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"efficiency must be a share, above 0 and at most 1, such as 0.5, got {shown(value)}")
    return share
