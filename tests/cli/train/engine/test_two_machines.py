"""Two torchruns in two folders, as on two machines. They find each other in the ways of docs/distributed.md."""

from pathlib import Path

import pytest
import torch

from tests.cli.conftest import write_text_file
from tests.cli.train.conftest import read_metrics

from .torchrun import ended, free_port, launch, overrides, start

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    pytest.mark.slow,
]


def _arguments(port: str) -> list[str]:
    """The arguments of torchrun, by hand and under SLURM."""
    endpoint = f"localhost:{port}"
    return [
        *("--nnodes", "2", "--nproc-per-node", "1", "--shutdown-timeout", "100"),
        *("--rdzv-id", "7", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
    ]


def _variables(port: str, machine: int) -> dict[str, str]:
    """The variables of Kubeflow's operator. RANK is the rank of the pod; torchrun sets the rank of each process."""
    main = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    grid = {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": str(machine), **main}
    return {**main, "RANK": str(machine), "WORLD_SIZE": "2", **{f"PET_{name}": value for name, value in grid.items()}}


@pytest.mark.parametrize("way", ["arguments", "variables"])
def test_two_machines_are_one_run(way: str, tmp_path: Path) -> None:
    asked = [*overrides(write_text_file(tmp_path)), "parallel=fsdp", "train.steps=2"]
    alone = ended(start(2, "-m", "fuselayers", "train", *asked, f"train.output={tmp_path / 'one'}", folder=tmp_path))
    assert alone.returncode == 0, alone.stderr
    port, programs = free_port(), []
    for machine in range(2):
        folder = tmp_path / f"machine-{machine}"
        folder.mkdir()
        command = ["-m", "fuselayers", "train", *asked, f"train.output={tmp_path / 'two'}"]
        arguments, variables = (_arguments(port), {}) if way == "arguments" else ([], _variables(port, machine))
        programs.append(launch(*arguments, *command, folder=folder, variables=variables))
    first, second = (ended(program) for program in programs)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert (first.stdout + second.stdout).count("2 processes, dp 2 x tp 1, shard fsdp") == 1
    assert [row.loss for row in read_metrics(tmp_path / "two")] == [row.loss for row in read_metrics(tmp_path / "one")]
    assert not any(path for machine in range(2) for path in (tmp_path / f"machine-{machine}").iterdir())
