"""`fuselayers list`: every component with its options and what each group chooses from, or a composed config."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple

import torch
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..components import registry
from ..configs import GROUPS, build, choices, compose, model_costs, to_yaml
from ..configs.costs import parameter_counts
from ..configs.sources import parse_overrides
from ..configs.tables import HEADINGS, TABLES, option_rows
from ..names import no_such

SUMMARY = "show components with their options, or a composed config"
DESCRIPTION = """\
Shows every registered component with its options and what each group of the config chooses from, the same of one kind
or section, or what overrides of the config make.

  fuselayers list                                    every component
  fuselayers list feedforward                        those of one kind, and what feedforward= takes
  fuselayers list train                              what can be set in a section: train, data or fusion
  fuselayers list model=gpt2_small norm=rms_norm     the composed config and what the model costs

`hydra.searchpath=[/my/configs]` beside any of them adds files of your own to what the groups choose from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A kind, or overrides."""
    parser.add_argument("items", nargs="*", metavar="KIND | OVERRIDE", help=f"one of {', '.join(TABLES)}; or key=value")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print tables of components, or the config that the overrides make.

    Raises:
        ValueError: no such kind, a kind together with overrides, or overrides that do not fit.
        OSError: there is no such folder as hydra.searchpath names.
    """
    items: list[str] = arguments.items
    kinds = [item for item in items if "=" not in item]
    overrides = [item for item in items if "=" in item]
    asked = parse_overrides(overrides)
    # hydra.searchpath alone is no config.
    is_config = bool(asked.choices or asked.settings)
    if len(kinds) > 1 or (kinds and is_config):
        raise ValueError(f"list takes one kind or overrides key=value, got {' '.join(items)}")
    if is_config:
        _print_config(overrides, console)
        return 0
    taken = {group: choices(group, asked.search_path) for group in GROUPS}
    if kinds and kinds[0] not in TABLES:
        raise ValueError(no_such("kind", kinds[0], TABLES) + _as_choice(kinds[0], taken))
    for kind in kinds or registry.KINDS:
        if option_rows(kind):
            console.print(_table(kind), highlight=False)
            if kind in taken:
                console.print(f"{kind}= takes {', '.join(taken[kind])}", highlight=False, markup=False)
            console.print()
    return 0


def _as_choice(name: str, taken: Mapping[str, Sequence[str]]) -> str:
    """The end of an error's text: the group that has the name, if any."""
    found = [f"{group}={name}" for group, names in taken.items() if name in names]
    return f"; to see what it is, write {' or '.join(found)}" if found else ""


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
        # As Text: rich would read the square brackets of a type as markup.
        table.add_row(*(Text(cell) for cell in ("" if name == before else name, *cells)))
        before = name
    return table


def _print_config(overrides: list[str], console: Console) -> None:
    config = compose(overrides=overrides)
    # A model on the meta device has shapes and no memory.
    with torch.device("meta"):
        parameters, in_tables = parameter_counts(build(config))
    console.print(Syntax(to_yaml(config).rstrip(), "yaml", background_color="default"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False, caption_justify="left")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(f"{parameters:,}", "parameters")
    table.add_row(f"{parameters - in_tables:,}", "parameters without embeddings")
    uncounted = None
    try:
        costs = model_costs(config)
    except ValueError as error:
        uncounted = str(error)
    else:
        table.add_row(f"{costs.forward_flops_per_token / 1e6:,.1f}", "MFLOP per token, forward")
        table.add_row(f"{costs.training_flops_per_token / 1e6:,.1f}", "MFLOP per token, forward and backward")
        table.add_row(f"{costs.float32_bytes_per_token / 1e3:,.1f}", "kB per token saved for backward in float32")
        table.add_row(f"{costs.bfloat16_bytes_per_token / 1e3:,.1f}", "kB per token saved for backward in bfloat16")
        table.caption = f"of a full context, {costs.tokens:,} tokens; eager, unfused"
    console.print(table, highlight=False)
    if uncounted is not None:
        console.print(uncounted, highlight=False, markup=False)
