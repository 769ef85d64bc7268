"""`fuselayers plan`: its arguments and its output."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rich.console import Console

from ...configs import compose
from ...configs.sources import split_source
from ...names import shown
from ..parser import add_imports, add_overrides
from ..text import say
from .check import checked_models, print_check
from .hardware import CPU, hardware_called
from .layout import is_budget, layout_of
from .measure import this_machine
from .model import planned_model
from .report import as_dict, print_details, print_model, print_plans
from .search import best_plans, fits, plan_of, too_large
from .trace import SELECTIVE

DESCRIPTION = """\
Says what a training step will cost on GPUs that need not be here: parameters, FLOPs, bytes of activations for each way
to save them, memory and communication of a layout, the largest batch that fits, the expected time. Nothing runs.
Without a layout it tries those that a user would, and prints the best.

  fuselayers plan model=llama3_8b gpus=8
  fuselayers plan model=llama3_8b gpus=512 gpu=h200 budget=0.3
  fuselayers plan model=llama3_8b gpus=64 parallel.tp=8 parallel.sequence=true parallel.shard=fsdp batch=4
  fuselayers plan model=gpt_nano gpu=cpu --check

gpus= is their number, gpu= their kind (a100, h100, h200, b200, mi300x, or cpu: this machine, measured), budget= a share
of what eager mode saves, batch= the examples of each data-parallel group in a step. Products run in bfloat16 on a GPU
unless train.precision=float32."""

_SHOWN: Final = 6


@dataclass
class Asked:
    """A command line, parsed.

    Attributes:
        overrides: of the config.
        gpus: how many.
        gpu: of which kind.
        has_layout: whether an override is of the section `parallel`.
        budget: the partitioner's name of a budget; None without.
        batch: examples; None where nobody said.
        precision: the dtype of products; None where nobody said.
    """

    overrides: list[str] = field(default_factory=list)
    gpus: int = 1
    gpu: str = "h100"
    has_layout: bool = False
    budget: str | None = None
    batch: int | None = None
    precision: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the hardware and the layout."""
    add_overrides(
        parser,
        nargs="+",
        metavar="MODEL | FILE | OVERRIDE",
        help="model=llama3_8b, gpus=8, gpu=h100, budget=0.5, parallel.tp=2, and overrides of the config",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--check", action="store_true", help="with gpu=cpu: compare with measured steps; takes minutes")
    add_imports(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Plan and print.

    Raises:
        ValueError: an argument that cannot be, or a layout that does not fit; the text says what to change.
    """
    asked = read_arguments(arguments.overrides)
    source, overrides = split_source(asked.overrides)
    config = compose(source or "gpt_nano", overrides)
    name = next((one.partition("=")[2] for one in overrides if one.startswith("model=")), config.model.name)
    if arguments.check:
        if asked.gpu != CPU:
            raise ValueError("--check measures this machine's CPU; add gpu=cpu")
        print_check(console, checked_models(name, config, batch=asked.batch), as_json=arguments.json)
        return 0
    layout = layout_of(config.parallel) if asked.has_layout or asked.gpu == CPU else None
    if layout is not None and asked.budget:
        layout = replace(layout, checkpointing=asked.budget)
    batch = asked.batch
    if asked.gpu == CPU:
        batch = batch or config.train.batch_size
        hardware = this_machine(config, batch)
    else:
        hardware = hardware_called(asked.gpu)
    with console.status("counting a model of one layer and one of two"):
        model = planned_model(
            config,
            checkpointing=[SELECTIVE, asked.budget or (layout.checkpointing if layout else "none")],
            precision=asked.precision or ("float32" if asked.gpu == CPU else "bfloat16"),
            name=name,
        )
    if layout is not None:
        plans = [plan_of(model, hardware, layout, gpus=asked.gpus, batch=batch)]
        if not fits(plans[0], hardware):
            raise ValueError(too_large(model, hardware, plans[0]))
    else:
        plans = best_plans(model, hardware, gpus=asked.gpus, batch=batch, budget=asked.budget)
    if arguments.json:
        say(console, json.dumps(as_dict(model, plans, hardware, gpus=asked.gpus), indent=2))
        return 0
    print_model(console, model)
    print_plans(console, plans[:_SHOWN], hardware, gpus=asked.gpus)
    print_details(console, plans[0])
    return 0


def read_arguments(words: Sequence[str]) -> Asked:
    """Return what the words ask for; those that are not the plan's own are overrides of the config.

    Raises:
        ValueError: a value that cannot be.

    >>> asked = read_arguments(["model=gpt_nano", "gpus=4", "parallel.shard=fsdp"])
    >>> asked.gpus, asked.has_layout, asked.overrides
    (4, True, ['model=gpt_nano', 'parallel.shard=fsdp'])
    """
    asked = Asked()
    for word in words:
        key, _, value = word.partition("=")
        if key == "gpus":
            asked.gpus = _whole(key, value)
        elif key == "batch":
            asked.batch = _whole(key, value)
        elif key == "gpu":
            asked.gpu = value
        elif key == "budget":
            asked.budget = value if value.startswith("budget:") else f"budget:{value}"
            if not is_budget(asked.budget):
                raise ValueError(f"budget must be a share of what eager mode saves, as 0.5, got {shown(value)}")
        else:
            asked.has_layout |= key == "parallel" or key.startswith("parallel.")
            if key == "train.batch_size":
                raise ValueError("train.batch_size is of all data-parallel groups; a plan takes batch=, that of each")
            if key == "train.precision":
                asked.precision = value
            asked.overrides.append(word)
    if asked.gpu == CPU and asked.gpus != 1:
        raise ValueError(f"gpu=cpu is this machine, one device; leave gpus={asked.gpus} out, or name a GPU")
    return asked


def _whole(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{key} must be a number from 1 on, got {shown(value)}")
    return int(value)
