"""Start the processes of a run, by torchrun or by its variables, and read their results."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cli.conftest import tiny_on
from tests.processes import Program

_RUNS = Path(__file__).with_name("runs.py")
_ROOT = Path(__file__).parents[4]
# Sets the variables of torchrun. Without it, no process imports torch anew.
_AS_TORCHRUN_DOES = """
import os, runpy, sys, torch
torch.set_num_threads(1)
rank, size, port = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="localhost", MASTER_PORT=port)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def overrides(text: Path, *more: str) -> list[str]:
    """A run of four steps of two micro-batches, without dropout and fusion unless `more` says so."""
    steps = "train.steps=4", "train.evaluate_every=2", "train.evaluate_batches=1", "train.checkpoint_every=2"
    return [*tiny_on(text), *steps, "model.num_layers=2", "train.accumulate=2", *more]


def start(processes: int, *arguments: str, folder: Path) -> "subprocess.Popen[str]":
    """Start a program with torchrun, in a folder."""
    return launch("--standalone", "--nproc-per-node", str(processes), *arguments, folder=folder)


def launch(*arguments: str, folder: Path, variables: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start torchrun with these arguments and variables, in a folder."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    environment.update(variables or {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(program: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Wait for the end of a program that torchrun started."""
    try:
        printed, errors = program.communicate(timeout=900)
    finally:
        program.terminate()  # torchrun then ends its processes
    return subprocess.CompletedProcess(program.args, program.returncode, printed, errors)


def free_port() -> str:
    """A port that no program of this machine uses."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def run_all(
    processes: int, runs: Mapping[str, Sequence[str]], *, events: Mapping[str, str] | None = None, folder: Path
) -> dict[str, dict[str, Any]]:
    """Run trainings in the same processes, and return their results by name; see runs.py.

    Args:
        processes: the number of processes.
        runs: the overrides by name. The files of a run are in folder / name, unless it continues another run.
        events: the events by name, see runs.py.
        folder: the folder of all runs.
    """
    asked = {
        name: (
            [*overrides, *([] if "train.resume" in overrides[0] else [f"train.output={folder / name}"])],
            (events or {}).get(name),
        )
        for name, overrides in runs.items()
    }
    (folder / "runs.json").write_text(json.dumps(asked))
    arguments = str(processes), free_port(), str(_RUNS), str(folder)
    programs = [Program(_AS_TORCHRUN_DOES, str(rank), *arguments, folder=folder) for rank in range(processes)]
    ends = [program.wait() for program in programs]
    assert [end.code for end in ends] == [0] * processes, [end.errors for end in ends]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in runs}
