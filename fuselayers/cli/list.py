"""`fuselayers list`: the components, the options of some, or a composed config."""

import argparse
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console

from ..components import registry
from ..configs import GROUPS, build, choices, compose, to_yaml
from ..configs.build import parse_overrides
from ..configs.costs import parameter_counts
from ..configs.sections import COMPONENT_GROUPS, SECTIONS
from ..configs.tables import TABLES, OptionRow, option_rows
from ..names import no_such
from .parser import add_imports
from .text import say

DESCRIPTION = """\
Shows every registered component in a line, the options of one or of a kind, or the config that overrides make.

  fuselayers list                          every component, and the groups' choices
  fuselayers list attention                the options of a kind's components
  fuselayers list feedforward.gated_mlp    those of one component
  fuselayers list train                    a section: train, data, parallel or fusion
  fuselayers list model=gpt2_small         a config, and its model's parameters

Add `hydra.searchpath=[/my/configs]` to any of them to include your own config files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kind, the component or the overrides to show."""
    parser.add_argument(
        "items",
        nargs="*",
        metavar="KIND | KIND.NAME | OVERRIDE",
        help=f"the kinds and sections are {', '.join(TABLES)}; an override is key=value",
    )
    add_imports(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print components, options, or the config that the overrides make.

    Raises:
        ValueError: no such kind or component, a kind together with overrides, or invalid overrides.
        OSError: a folder of hydra.searchpath does not exist.
    """
    items: list[str] = arguments.items
    kinds = [item for item in items if "=" not in item]
    overrides = [item for item in items if "=" in item]
    asked = parse_overrides(overrides)
    # hydra.searchpath alone does not make a config.
    is_config = bool(asked.choices or asked.settings)
    if len(kinds) > 1 or (kinds and is_config):
        raise ValueError(f"list takes one kind or overrides key=value, got {' '.join(items)}")
    if is_config:
        _print_config(overrides, console)
        return 0
    taken = {group: choices(group, asked.search_path) for group in GROUPS}
    if kinds:
        _print_options(kinds[0], taken, console)
    else:
        _print_names(taken, console)
    return 0


def _print_names(taken: Mapping[str, Sequence[str]], console: Console) -> None:
    for kind in registry.KINDS:
        names = registry.names(kind)
        if names:
            say(console, kind, bold=True)
        size = max(map(len, names), default=0) + 4
        for name in names:
            say(console, (f"  {name}".ljust(size) + _summary(registry.get(kind, name))).rstrip())
    say(console, "in a config", bold=True)
    for group in (group for group in taken if group not in COMPONENT_GROUPS):
        say(console, f"  {group}=".ljust(12) + ", ".join(taken[group]))
    say(console, "for options: fuselayers list feedforward.gated_mlp, or a kind: list feedforward")


def _summary(component: type) -> str:
    """The first sentence of a class's docstring."""
    return (component.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def _print_options(asked: str, taken: Mapping[str, Sequence[str]], console: Console) -> None:
    kind, _, name = asked.partition(".")
    if kind not in TABLES:
        raise ValueError(no_such("kind", asked, TABLES))
    rows = option_rows(kind)
    if name and kind in SECTIONS:
        if name not in [row.option for row in rows]:
            raise ValueError(no_such(f"{kind} option", name, [row.option for row in rows]))
        rows = [row for row in rows if row.option == name]
    elif name:
        registry.get(kind, name)  # raises for an unknown name
        rows = [row for row in rows if row.name == name]
    size = max((len(row.option) for row in rows), default=0) + 4
    before = ""
    for row in rows:
        if row.name != before:
            title = kind if kind in SECTIONS else f"{kind}.{row.name}"
            say(console, *([""] if before else []), title, bold=True)
            if kind not in SECTIONS and (summary := _summary(registry.get(kind, row.name))):
                say(console, f"  {summary}")
            before = row.name
        text = f"  {row.option}".ljust(size) + _described(row) if row.option else f"  {row.meaning}"
        say(console, text)
    if not name and kind in taken:
        say(console, "", f"{kind}= takes {', '.join(taken[kind])}")


def _described(row: OptionRow) -> str:
    """Return the type, range, default and meaning of an option in words."""
    default = row.default if row.default == "required" else f"default {row.default}"
    facts = ", ".join(filter(None, (row.type, row.range, default)))
    return f"{facts}: {row.meaning}" if row.meaning else facts


def _print_config(overrides: list[str], console: Console) -> None:
    config = compose(overrides=overrides)
    # A model on the meta device takes no memory.
    with torch.device("meta"):
        parameters, in_tables = parameter_counts(build(config))
    say(console, to_yaml(config).rstrip())
    say(console, f"{parameters:,} parameters, {parameters - in_tables:,} without embeddings")
