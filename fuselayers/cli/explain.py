"""`fuselayers explain`: what a model of the configs saves for backward, and why, without running it."""

import argparse
from pathlib import Path

import torch
from rich.console import Console

from ..configs import build, compose
from ..configs.build import split_source
from ..partition import PARTITIONERS, eager_view, explain, partitioner
from .example import example_batch, sizes_of
from .files import write_text
from .parser import add_imports
from .text import say

DESCRIPTION = """\
Cuts the forward and backward graph of one training step of a model, without running it or allocating its memory, and
prints what is saved, what is recomputed, why, and what eager and PyTorch's own partitioners would save.

  fuselayers explain gpt_nano
  fuselayers explain gpt_nano fusion.compress=int8   # runs it on random inputs: the error of each value and gradient
  fuselayers explain gpt2_small feedforward=fused_mlp --batch 8x512 --partition budget:0.5"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the partitioner, and the files to write."""
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="MODEL | FILE | OVERRIDE",
        help="a model of the configs or a config file, then overrides: gpt2_small norm=rms_norm",
    )
    parser.add_argument("--batch", default="1", help="examples, or sequences x tokens (default: 1 of full length)")
    parser.add_argument(
        "--backend", help="inductor, triton, nvfuser or eager (default: the config's; auto is inductor)"
    )
    parser.add_argument(
        "--partition",
        help=f"{', '.join(PARTITIONERS)}, budget:0.5 (a share), budget:2GB (bytes) or budget:peak:2GB "
        "(default: the config's)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report to this file")
    add_imports(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Explain, print, and write what was asked for.

    Raises:
        ValueError: an argument is invalid; the text says what is valid.
        PartitionError: the budget is too small for the model.
    """
    source, overrides = split_source(arguments.overrides)
    config = compose(source or "gpt_nano", overrides)
    cut = partitioner(arguments.partition or config.fusion.partition)
    backend = arguments.backend or config.fusion.backend
    compress = config.fusion.compress
    # A model on the meta device takes no memory. The errors of compression need real numbers.
    device = "meta" if compress is None else "cpu"
    with torch.device(device):
        model = build(config)
        plain = eager_view(model)
        sizes = sizes_of(arguments.batch, option="--batch")
        inputs = example_batch(plain, config, sizes, device=device)
    with console.status("tracing and cutting the graphs of a training step: up to a minute for a large model"):
        report = explain(plain, *inputs, backend=backend, partition=cut, compress=compress)
    say(console, report.to_text(rows=20, width=console.width))
    if arguments.json:
        write_text(Path(arguments.json), report.to_json() + "\n")
        say(console, f"written: {arguments.json}")
    return 0
