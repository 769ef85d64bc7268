"""`fuselayers list`: every registered component with its options, or the config that overrides make."""

import argparse
from dataclasses import astuple

import torch
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..components import registry
from ..configs import build, compose, to_yaml
from ..configs.tables import HEADINGS, TABLES, option_rows
from ..names import no_such

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY = "show components with their options, or a composed config"
DESCRIPTION = """\
Shows every registered component with its options, those of one kind or section, or what overrides of the config make.

  fuselayers list                                    every component
  fuselayers list feedforward                        those of one kind
  fuselayers list train                              what can be set in a section: train, data or fusion
  fuselayers list model=gpt2_small norm=rms_norm     the composed config and how many parameters the model has"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A kind, or overrides."""
    parser.add_argument("items", nargs="*", metavar="KIND | OVERRIDE", help=f"one of {', '.join(TABLES)}; or key=value")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print tables of components, or the config that the overrides make.

    Raises:
        ValueError: no such kind, a kind together with overrides, or overrides that do not fit.
    """
    items: list[str] = arguments.items
    kinds = [item for item in items if "=" not in item]
    if kinds and (len(kinds) > 1 or len(items) > 1):
        raise ValueError(f"list takes one kind or overrides key=value, got {' '.join(items)}")
    if kinds and kinds[0] not in TABLES:
        raise ValueError(no_such("kind", kinds[0], TABLES))
    if items and not kinds:
        _print_config(items, console)
        return 0
    for kind in kinds or registry.KINDS:
        if option_rows(kind):
            console.print(_table(kind), highlight=False)
            console.print()
    return 0


def _table(kind: str) -> Table:
    table = Table(title=kind, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(
            heading,
            no_wrap=heading in ("name", "option"),
            overflow="fold",
            ratio=1 if heading == "meaning" else None,
        )
    before = ""
    for row in option_rows(kind):
        name, *cells = astuple(row)
        # As Text, because a type holds square brackets, and rich would read markup in them.
        table.add_row(*(Text(cell) for cell in ("" if name == before else name, *cells)))
        before = name
    return table


def _print_config(overrides: list[str], console: Console) -> None:
    config = compose(overrides=overrides)
    # A model on the meta device has shapes and no memory: the largest one is counted at once.
    with torch.device("meta"):
        model = build(config)
    console.print(Syntax(to_yaml(config).rstrip(), "yaml", background_color="default"))
    console.print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", highlight=False)
