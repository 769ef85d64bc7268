"""Measures the figures of this machine that the fusion core uses to weigh memory against arithmetic."""

from collections.abc import Callable
from typing import Final

import torch
from rich.console import Console

from ...partition import Machine, machine_of
from ...partition.choose.machine import write_tuned
from ..machine import describe_machine
from ..text import print_table, say
from ..timer import Step, median_seconds, time_in_turns

_REPEATS: Final = 9
# How often a short op runs in one timed span.
_CHAIN: Final = 32
# Elements of a float32 vector that fits into no cache, and the width of the matrices that are multiplied.
SIZES_ON_A_CPU: Final = (1 << 25, 1536)
_SIZES_ON_A_GPU: Final = (1 << 28, 8192)
# A vectorised exponential: range reduction 4, a polynomial of degree 5 in fused multiply-adds 10, scaling 2.
_EXP_FLOPS: Final = 16


def tune_prices(device: torch.device, *, console: Console) -> None:
    """Measure, print the new figures beside the old ones, and store the new ones."""
    before, machine = machine_of(device.type), measure(device)
    say(console, describe_machine(device))
    rows = [
        {"": label}
        | {
            heading: f"{getattr(figures, name) / scale:,.1f} {unit}"
            for heading, figures in (("measured", machine), ("until now", before))
        }
        for label, name, scale, unit in (
            ("memory", "bandwidth", 1e9, "GB/s"),
            ("float32 matmul", "flop_rate", 1e9, "GFLOP/s"),
            ("bfloat16 matmul", "low_precision_flop_rate", 1e9, "GFLOP/s"),
            ("elementwise", "vector_flop_rate", 1e9, "GFLOP/s"),
            ("kernel", "kernel_seconds", 1e-6, "us"),
        )
    ]
    print_table(console, rows)
    say(console, f"stored in {write_tuned(device.type, machine)}")


def measure(device: torch.device) -> Machine:
    """Return the figures of a device, from medians of a few runs each.

    On a GPU the times are the GPU's own, between two events. Every run except that of the smallest kernel fills the
    chip.
    """
    on_cpu = device.type == "cpu"
    size, width = SIZES_ON_A_CPU if on_cpu else _SIZES_ON_A_GPU
    x = torch.randn(size, device=device)
    out = torch.empty_like(x)
    bandwidth = 2 * x.numel() * x.element_size() / _seconds(lambda: torch.neg(x, out=out), device)
    rates = {dtype: _matmul_rate(width, dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    tiny = torch.zeros(8, device=device)  # one more op on it does almost no work
    kernel_seconds = _seconds(tiny.neg_, device, chain=_CHAIN)
    return Machine(
        name=f"measured: {describe_machine(device)}",
        bandwidth=bandwidth,
        flop_rate=rates[torch.float32],
        low_precision_flop_rate=rates[torch.bfloat16],
        # Without TF32 a GPU's float32 matmul runs on the units of elementwise ops. No such op could keep them busy.
        vector_flop_rate=_exp_rate(kernel_seconds) if on_cpu else rates[torch.float32],
        kernel_seconds=kernel_seconds,
    )


def _exp_rate(kernel_seconds: float) -> float:
    """Return FLOPs per second of exponentials. The vector fits into the cache, so that arithmetic dominates."""
    x = torch.rand(1 << 14)
    out = torch.empty_like(x)
    seconds = _seconds(lambda: torch.exp(x, out=out), torch.device("cpu"), chain=_CHAIN) - kernel_seconds
    return len(x) * _EXP_FLOPS / max(seconds, 1e-9)


def _matmul_rate(width: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2.0 * width**3 / _seconds(lambda: a @ b, device)


def _seconds(run: Callable[[], object], device: torch.device, *, chain: int = 1) -> float:
    """Return the median time of a run, timed in chains of this length."""

    def run_chain(_: None) -> object:
        for _number in range(chain - 1):
            run()
        return run()

    times = time_in_turns({"run": Step(run_chain)}, device=device, rounds=_REPEATS, warm_up=2)
    return median_seconds(times)["run"] / chain
