"""`train.profile=10..12`: torch.profiler over these steps, a Chrome trace and a table by op in the run's folder."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...configs import TrainConfig
from ..files import temporary_name, write_text

_ROWS: Final = 40


def check_profile(config: TrainConfig, *, done: int) -> None:
    """Refuse a range of steps that this session does not run.

    Raises:
        ValueError: it begins before the session, or ends after the run.
    """
    steps = config.profiled_steps
    if steps and not (done < steps[0] and steps[-1] <= config.steps):
        raise ValueError(
            f"train.profile must be of steps from {done + 1} to train.steps={config.steps}, which this session runs, "
            f"got {config.profile}"
        )


class StepProfiler:
    """A context around a session's steps that profiles some of them.

    Where the run stops within the range, it writes what there is.

    Args:
        steps: of `TrainConfig.profiled_steps`; empty to profile nothing.
        folder: of the run.
        device: of the model.

    Attributes:
        written: the trace and the table, once they are written.
    """

    def __init__(self, steps: range, *, folder: Path, device: torch.device) -> None:
        self.written: tuple[Path, ...] = ()
        self._steps = steps
        self._folder = folder
        self._device = device
        self._profile: profile | None = None
        self._last = 0

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._write()

    def step(self, number: int) -> AbstractContextManager[None]:
        """A context around a step."""
        return self._profiled(number) if number in self._steps else nullcontext()

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profile.start()
        self._last = number
        with record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self._write()

    def _write(self) -> None:
        finished, self._profile = self._profile, None
        if finished is None:
            return
        finished.stop()
        name = f"profile_{self._steps[0]}-{self._last}"
        trace, table = (self._folder / f"{name}{suffix}" for suffix in (".trace.json", ".txt"))

        # Renamed when it is whole, as every file of a run; the run's lock removes what a kill leaves.
        beside = temporary_name(trace)
        try:
            finished.export_chrome_trace(str(beside))
            os.replace(beside, trace)
        finally:
            beside.unlink(missing_ok=True)
        by = "self_cpu_time_total" if self._device.type == "cpu" else "self_device_time_total"
        write_text(table, finished.key_averages().table(sort_by=by, row_limit=_ROWS) + "\n")
        self.written = (trace, table)
