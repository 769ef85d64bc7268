"""`fuselayers data`: the arguments, and what is said at the end."""

import argparse
import time
from pathlib import Path
from typing import Final

from rich.console import Console

from ..text import say
from .prepare import prepare

DESCRIPTION: Final = """\
Prepares text for training.

  fuselayers data prepare books/ --out tokens/
  fuselayers train data.path=tokens/"""
_PREPARE: Final = """\
Writes a text file, or the files of a folder, as one file of tokens, which training maps into memory: for text that is
larger than memory. Reads and writes piece by piece. Without a tokenizer a token is a byte, and training is the same as
on the text itself. With one a token is an id of the package tokenizers, 2 or 4 bytes of the file.

  fuselayers data prepare books/ --out tokens/ --suffixes .txt,.md
  fuselayers data prepare books/ --out tokens/ --tokenizer tokenizer.json
  fuselayers train data.path=tokens/ model.vocab_size=50257

The same share of the text is held out as by train. Whole files are documents: a zero byte, or the tokenizer's token,
ends each of them; a single file is one document without an end. The folder is there when it is whole: a kill leaves
only a folder named *.part, which can be removed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action and its arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    action = actions.add_parser("prepare", help="write text as a file of tokens", description=_PREPARE)
    action.add_argument("text", metavar="TEXT", help="a text file or a folder")
    action.add_argument("--out", required=True, metavar="FOLDER", help="a folder that does not exist yet")
    action.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json of the package tokenizers")
    action.add_argument("--end-token", metavar="TOKEN", help="ends a document (default: the tokenizer's <|endoftext|>)")
    action.add_argument("--held-out", type=float, default=0.1, metavar="SHARE", help="for validation (default 0.1)")
    action.add_argument(
        "--suffixes", default="", metavar=".A,.B", help="of the files to read (default: all text files)"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write the folder and say what is in it.

    Raises:
        ValueError, OSError: as `prepare`.
    """
    started = time.perf_counter()
    out = Path(arguments.out).expanduser()
    header = prepare(
        arguments.text,
        out,
        held_out=arguments.held_out,
        suffixes=tuple(filter(None, arguments.suffixes.split(","))),
        tokenizer=None if arguments.tokenizer is None else Path(arguments.tokenizer).expanduser(),
        end_token=arguments.end_token,
        console=console,
    )
    unit = "tokens" if header.tokenizer else "bytes"
    files = "file" if header.documents == 1 else "files"
    say(
        console,
        f"{header.train_tokens:,} {unit} to learn from and {header.held_out_tokens:,} held out, of {header.documents} "
        f"{files} of {header.source}, as {header.dtype}, in {time.perf_counter() - started:,.1f} s",
        f"train on it: fuselayers train data.path={out}"
        + (f" model.vocab_size={header.vocab_size}" if header.tokenizer else ""),
    )
    return 0
