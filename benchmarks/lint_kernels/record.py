"""record -- the launches that ops on meta tensors would make on a GPU, for the lint and the tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers.ops.implementations import launch

_PROCESSORS_OF_AN_H200: Final = 132


class Launch(NamedTuple):
    """The arguments of one call of `launch`."""

    function: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    num_warps: int


class _Recorder:
    """Takes the place of a GPU in `launch`."""

    def __init__(self, processors: int, resident: Callable[[Launch], int]) -> None:
        self.processors, self.resident = processors, resident
        self.launches: list[Launch] = []

    def __call__(
        self,
        function: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        persistent_warps: int | None,
    ) -> int:
        # Detached aliases, so that a record keeps no autograd graph alive; a tensor that is passed twice has one alias.
        aliases = {id(argument): argument.detach() for argument in arguments if isinstance(argument, Tensor)}
        recorded = tuple(aliases.get(id(argument), argument) for argument in arguments)
        started = Launch(function, grid, recorded, constants, num_warps)
        if persistent_warps is not None:
            most = launch.most_resident(num_warps, persistent_warps)
            at_a_time = self.processors * min(self.resident(started), most)
            started = started._replace(grid=launch.persistent_grid(grid, at_a_time))
        self.launches.append(started)
        return started.grid[0]


class _AsOnGPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, this library's ops run their CUDA implementation on tensors of any device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith("fuselayers::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            with self:  # for the ops that the implementation calls
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs or {})
        return func(*args, **kwargs or {})


@contextmanager
def recorded_launches(
    *, processors: int = _PROCESSORS_OF_AN_H200, resident: Callable[[Launch], int] = lambda launch: 1
) -> Iterator[list[Launch]]:
    """Record the launches of ops on meta tensors, and run none of them.

    The ops must be called with backend="triton".

    Args:
        processors: of the GPU.
        resident: returns how many programs of a launch one of them runs at a time.
    """
    before, launch.recorder = launch.recorder, _Recorder(processors, resident)
    try:
        with _AsOnGPU():  # type: ignore[no-untyped-call]
            yield launch.recorder.launches
    finally:
        launch.recorder = before
