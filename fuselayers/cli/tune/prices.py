"""The figures of this machine, by which the fusion core weighs memory against arithmetic."""

from collections.abc import Callable
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from ...partition import Machine, machine_of
from ...partition.machine import write_tuned
from ...partition.timer import Step, median_seconds, time_in_turns
from ..machine import describe_machine

_REPEATS: Final = 9
# How often an op of microseconds is run within one reading of the clock.
_CHAIN: Final = 32
# Of a vectorised exponential: range reduction 4, a polynomial of degree 5 in fused multiply-adds 10, scaling 2.
_EXP_FLOPS: Final = 16


def tune_prices(device: torch.device, *, keep: bool, console: Console) -> None:
    """Measure, print beside the figures until now, and store."""
    before, machine = machine_of(device.type), measure(device)
    console.print(describe_machine(device), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("measured", "until now"):
        table.add_column(heading, justify="right")
    for label, name, scale, unit in (
        ("memory", "bandwidth", 1e9, "GB/s"),
        ("float32 matmul", "flop_rate", 1e9, "GFLOP/s"),
        ("bfloat16 matmul", "low_precision_flop_rate", 1e9, "GFLOP/s"),
        ("elementwise", "vector_flop_rate", 1e9, "GFLOP/s"),
        ("kernel", "kernel_seconds", 1e-6, "us"),
    ):
        cells = (f"{getattr(one, name) / scale:,.1f} {unit}" for one in (machine, before))
        table.add_row(label, *cells)
    console.print(table, highlight=False)
    if keep:
        console.print(f"stored in {write_tuned(device.type, machine)}", highlight=False, soft_wrap=True)


def measure(device: torch.device, *, size: int = 1 << 25, width: int = 1536) -> Machine:
    """Return the machine that `device` is, from medians of a few runs each.

    Args:
        device: what to measure.
        size: elements of the float32 vector that is streamed; it should not fit into a cache.
        width: of the square matrices that are multiplied.
    """
    x = torch.randn(size, device=device)
    out = torch.empty_like(x)
    bandwidth = 2 * x.numel() * x.element_size() / _seconds(lambda: torch.neg(x, out=out), device)
    rates = {dtype: _matmul_rate(width, dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    # Small enough for the cache, so that arithmetic takes the time.
    small = torch.rand(min(size, 1 << 14), device=device)
    result = torch.empty_like(small)
    launch = _launch(device)
    vector = (
        small.numel()
        * _EXP_FLOPS
        / max(_seconds(lambda: _repeat(lambda: torch.exp(small, out=result)), device) / _CHAIN - launch, 1e-9)
    )
    return Machine(
        name=f"measured: {describe_machine(device)}",
        bandwidth=bandwidth,
        flop_rate=rates[torch.float32],
        low_precision_flop_rate=rates[torch.bfloat16],
        vector_flop_rate=vector,
        kernel_seconds=launch,
    )


def _matmul_rate(width: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2.0 * width**3 / _seconds(lambda: a @ b, device)


def _launch(device: torch.device) -> float:
    """Seconds for one more op that does next to nothing."""
    tiny = torch.zeros(8, device=device)
    return _seconds(lambda: _repeat(tiny.neg_), device) / _CHAIN


def _repeat(run: Callable[[], object]) -> None:
    for _ in range(_CHAIN):
        run()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a run."""
    times = time_in_turns({"run": Step(lambda _: run())}, device=device, rounds=_REPEATS, warm_up=2)
    return median_seconds(times)["run"]
