"""Run functions in a group of processes, and collect their results.

Only the files that the processes write count: gloo may abort a process after its work.
"""

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import PROCESSES

__all__ = ["run"]


def run(size: int, function: Callable[..., Any], *arguments: Any, folder: Path, seconds: float = 300) -> list[Any]:
    """Run `function(*arguments)` in `size` processes, a gloo group on this machine; return the results by rank."""
    processes = [
        PROCESSES.Process(target=_work, args=(rank, size, function, arguments, str(folder)), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    written = [folder / f"{rank}.pt" for rank in range(size)]
    end = time.monotonic() + seconds
    while not all(path.exists() for path in written) and time.monotonic() < end:
        if not any(process.is_alive() for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.join(timeout=5)
        process.kill()
    results = []
    for rank, path in enumerate(written):
        assert path.exists(), f"process {rank} of {size} wrote nothing within {seconds} s"
        result, error = torch.load(path, weights_only=False)
        assert error is None, f"process {rank} of {size}:\n{error}"
        results.append(result)
    return results


def _work(rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    result, error = None, None
    try:
        result = function(*arguments)
    except Exception:
        error = traceback.format_exc()
    torch.save((result, error), f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    if error is None:
        dist.barrier()
        dist.destroy_process_group()
