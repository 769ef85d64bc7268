"""Every command, and every report that `print` shows, fits a terminal of 80 columns, and a pipe."""

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TINY_MODEL, tiny_on, write_text_file
from tests.processes import run

_PROGRAM = """
import fcntl, functools, os, pty, struct, sys, termios, threading
import torch
from fuselayers.cli.main import main

torch.compile = functools.partial(torch.compile, backend="aot_eager")  # Inductor takes seconds

def run():
    {call}

if not {terminal}:
    run()
    sys.exit()
written = os.dup(1)
master, slave = pty.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
os.dup2(slave, 0), os.dup2(slave, 1)
os.close(slave)

def copy():
    try:
        while chunk := os.read(master, 1 << 16):
            os.write(written, chunk)
    except OSError:  # the terminal was closed
        pass

reader = threading.Thread(target=copy)
reader.start()
run()
sys.stdout.flush()
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)
reader.join()
"""

_MAIN = "assert main(sys.argv[1:]) == 0"
_BENCH = "import fuselayers.cli.bench.command as bench; bench.first_steps = lambda *_, **__: (9.0, 1.0); "
_TUNE = (
    "import fuselayers.cli.tune.step as step; own = step.backends; "
    "step.backends = lambda device: [status for status in own(device=device) if status.name == 'eager']; "
)
_LLAMA = (
    "import transformers as t; config = t.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
    "num_attention_heads=4, vocab_size=99); "
)
_SWAP = f"{_LLAMA} import fuselayers; print(fuselayers.swap(t.LlamaForCausalLM(config), level='layers'))"
_EXPLAIN = (
    f"import fuselayers; model = fuselayers.build('gpt_nano', {[*TINY_MODEL, 'fusion=off']}); "
    "print(fuselayers.explain(model, torch.zeros(2, 16, dtype=torch.int64)))"
)

# The same text in every run.
_SAME: dict[str, tuple[str, list[str]]] = {
    "list": (_MAIN, ["list"]),
    "list attention": (_MAIN, ["list", "attention"]),
    "list train": (_MAIN, ["list", "train"]),
    "list model=gpt_nano": (_MAIN, ["list", "model=gpt_nano"]),
    "backends": (_MAIN, ["backends"]),
    "plan": (_MAIN, ["plan", "model=llama3_8b", "gpus=64", "parallel.tp=8", "batch=2"]),
    "explain": (_MAIN, ["explain", "gpt_nano", *TINY_MODEL, "--batch", "2x16"]),
    "print(explain)": (_EXPLAIN, []),
    "swap": (f"{_LLAMA} t.LlamaForCausalLM(config).save_pretrained('llama'); {_MAIN}", ["swap", "llama"]),
    "print(swap)": (_SWAP, []),
}
_MEASURED: dict[str, tuple[str, list[str]]] = {
    "bench op": (_MAIN, ["bench", "op", "dropout", "--shape", "4x32", "--repeats", "2", "--backends", "eager"]),
    "bench model": (
        _BENCH + _MAIN,
        ["bench", "model", "gpt_nano", *TINY_MODEL, "--shape", "2x16", "--repeats", "2", "--backends", "eager"],
    ),
    "tune": (_TUNE + _MAIN, ["tune", *TINY_MODEL, "train.batch_size=2", "--device", "cpu"]),
    "train": (_MAIN, ["train", "train.output=run", "train.compare=true", "train.sample_bytes=300"]),
}


def printed(call: str, arguments: list[str], *, terminal: bool, folder: Path) -> str:
    """What a command prints, without the colours and the progress of a terminal."""
    if arguments[:1] == ["train"]:
        arguments = ["train", *tiny_on(write_text_file(folder)), *arguments[1:], "feedforward=fused_mlp"]
    ended = run(_PROGRAM.format(call=call, terminal=terminal), *arguments, folder=folder)
    assert ended.code == 0, ended.errors
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", ended.printed.replace("\r\n", "\n").replace("\r", "\n"))


# A pipe and a terminal differ in one place, where the console is made, and each process takes seconds.
_EVERY_DAY = ("list", "list model=gpt_nano", "backends")


def _cases(commands: dict[str, tuple[str, list[str]]], *, every_day: Collection[str]) -> list[Any]:
    return [
        pytest.param(*case, id=name, marks=() if name in every_day else pytest.mark.slow)
        for name, case in commands.items()
    ]


@pytest.mark.parametrize(
    ("call", "arguments"), _cases(_SAME | _MEASURED, every_day=(_SAME.keys() | _MEASURED) - {"swap"})
)
def test_a_terminal(call: str, arguments: list[str], tmp_path: Path) -> None:
    check_width(printed(call, arguments, terminal=True, folder=tmp_path))


@pytest.mark.parametrize(("call", "arguments"), _cases(_SAME | _MEASURED, every_day=_EVERY_DAY))
def test_a_pipe(call: str, arguments: list[str], tmp_path: Path) -> None:
    check_width(printed(call, arguments, terminal=False, folder=tmp_path))


def check_width(text: str) -> None:
    assert text.strip()
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("call", "arguments"), _cases(_SAME, every_day=_EVERY_DAY))
def test_nothing_is_cut(call: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = printed(call, arguments, terminal=False, folder=tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    wide = printed(call, arguments, terminal=False, folder=tmp_path)
    assert Counter("".join(narrow.split())) == Counter("".join(wide.split()))
    assert max(map(len, wide.splitlines())) > 80 or narrow == wide


@pytest.mark.parametrize("command", ["list", "explain", "bench", "plan", "train"])
def test_help_fits_too(command: str, tmp_path: Path) -> None:
    ended = run(
        "import sys\nfrom fuselayers.cli.main import main\nmain(sys.argv[1:])", command, "--help", folder=tmp_path
    )
    check_width(ended.printed)
