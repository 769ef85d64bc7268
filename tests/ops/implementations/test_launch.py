from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuselayers import ops
from fuselayers.ops.implementations import launch as launch_module
from fuselayers.ops.implementations.launch import (
    kernel,
    launch,
    most_programs,
    recorded_launches,
)
from fuselayers.ops.implementations.triton_language import HAS_TRITON, tl

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels without Triton")


class Function:
    """Stands for a Triton kernel: counts how often it is compiled, and keeps what it was run with."""

    def __init__(self) -> None:
        self.compiled: list[int] = []  # warps
        self.runs: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], num_warps: int) -> "Compiled":
        self.compiled.append(num_warps)
        return Compiled(self)


class Compiled:
    n_regs = 164
    metadata = SimpleNamespace(shared=16 << 10)

    def __init__(self, function: Function) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3
        return lambda *arguments: self.function.runs.append((grid, arguments))


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of "cpu"


@pytest.mark.usefixtures("_on_a_gpu")
class TestLaunch:
    def test_compiles_once_and_runs_directly_afterwards(self) -> None:
        function, x = Function(), torch.zeros(64)
        for rows in (1, 16, 17):  # none of which Triton may compile anew for
            launch_module.launch(function, (rows, 2), (x, None, rows, 0.5), (8, "gelu"), num_warps=8)
        assert function.compiled == [8]
        assert [grid for grid, _ in function.runs] == [(1, 2, 1), (16, 2, 1), (17, 2, 1)]
        assert [arguments[2] for _, arguments in function.runs] == [1, 16, 17]
        assert all(arguments[3:] == (0.5, 8, "gelu") for _, arguments in function.runs)

    @pytest.mark.parametrize(
        "arguments",
        [
            (torch.zeros(64, dtype=torch.bfloat16), None, 4),
            (torch.zeros(64)[1:], None, 4),  # at an address that is no multiple of 16
            (torch.zeros(64), torch.zeros(64), 4),
            (torch.zeros(64), None, 1 << 31),
            (torch.zeros(64), None, -(1 << 31) - 1),
        ],
        ids=["dtype", "alignment", "one tensor more", "a wide number", "a wide number below zero"],
    )
    def test_compiles_again_for_what_triton_specialises_on(self, arguments: tuple[Any, ...]) -> None:
        function = Function()
        for each in ((torch.zeros(64), None, 4), arguments, arguments):
            launch_module.launch(function, (1,), each, (8,))
        assert len(function.compiled) == 2


def test_a_kernels_numbers_are_not_specialised_on() -> None:
    @kernel
    def my_kernel(x_ptr, size, stride, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    if hasattr(my_kernel, "params"):  # the interpreter specialises on nothing
        assert [one.name for one in my_kernel.params if one.do_not_specialize] == ["size", "stride", "scale"]
        assert [one.name for one in my_kernel.params if one.is_constexpr] == ["BLOCK"]


@needs_triton
def test_launches_are_recorded_instead_of_made() -> None:
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    seed = torch.empty((), dtype=torch.int64, device="meta")
    with recorded_launches() as launches:
        y = ops.bias_activation_dropout(x, activation="relu", p=0.1, seed=seed, backend="triton")
        y.backward(torch.empty_like(y))
    assert [one.function.__name__ for one in launches] == ["_elementwise_kernel", "_backward_kernel"]
    forward = launches[0]
    assert forward.grid == (32, 2, 1)
    assert [one.shape if isinstance(one, torch.Tensor) else one for one in forward.arguments] == [
        *(x.shape, None, None, y.shape, seed.shape, None, 0),
        *(64, 512, 512, 0, 6554, pytest.approx(65536 / (65536 - 6554))),
    ]
    assert forward.constants == ("relu", False, 8, 2, 2048)
    assert forward.num_warps == 4
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.usefixtures("_on_a_gpu")
def test_persistent_programs_follow_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        shared_memory_per_multiprocessor=228 << 10,
        warp_size=32,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    launch_module._count_processors.cache_clear()
    function, x = Function(), torch.zeros(64)
    try:
        # 256 threads of 168 registers fit once on a processor, 128 threads three times.
        for grid, warps, most, programs in (
            ((10_000,), 8, 64, 132),
            ((10_000,), 4, 64, 3 * 132),
            ((10_000,), 4, 8, 2 * 132),
            ((10_000, 4), 8, 64, 33),
            ((7,), 8, 64, 7),
            ((7, 500), 8, 64, 1),
        ):
            launched = launch(function, grid, (x, 3), (8,), num_warps=warps, persistent_warps=most)
            assert launched == programs <= most_programs(grid, x.device, num_warps=warps, persistent_warps=most)
            assert function.runs[-1][0][:2] == (programs, *grid[1:], 1)[:2]
    finally:
        launch_module._count_processors.cache_clear()
    assert function.compiled == [8, 4]
