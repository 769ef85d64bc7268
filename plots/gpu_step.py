"""Measures a training step of a GPT on a GPU: the wall clock, the GPU's own time, launches and memory, by form.

python -m plots.gpu_step plots/gpu/<name of the GPU>    # writes steps.json there

A step is forward and backward of the loss. Each form also runs as a CUDA graph of the whole step, which the host starts
by one call; `torch.compile` with `mode="reduce-overhead"`, which makes graphs itself.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fuselayers
from fuselayers.cli.machine import measured_machine
from fuselayers.components.model.plain_torch import plain_twin
from fuselayers.partition import fuse

__all__ = ["main"]

ROUNDS: Final = 15
STEPS_OF_A_ROUND: Final = 3
SIZES: Final[dict[str, tuple[list[str], tuple[int, int]]]] = {
    "6 layers, 128 wide, 8 x 128 tokens": (["model.num_layers=6"], (8, 128)),
    "4 layers, 768 wide, 8 x 1024 tokens": (
        ["model.hidden_dim=768", "model.num_layers=4", "attention.num_heads=12", "model.context_length=1024"],
        (8, 1024),
    ),
}
FORMS: Final[dict[str, list[str]]] = {
    "plain PyTorch": ["fusion=off"],
    "torch.compile": ["fusion=off"],
    "eager layers": ["fusion=off"],
    "fused by block": [],
    "fused as one model": ["fusion.scope=model"],
    "fused by block, budget:0.65": ["fusion.partition=budget:0.65"],
    "fused by block, int8": ["fusion.compress=int8"],
    "fused by block, inductor": ["fusion=inductor"],
    "plain PyTorch, fused as one model": ["fusion=off"],
}


def made(form: str, size: list[str]) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """The model that holds the weights, and the callable that computes the loss."""
    torch.manual_seed(0)
    model = fuselayers.build("gpt_nano", [*size, *FORMS[form]]).to("cuda", torch.bfloat16).train()
    if form in ("plain PyTorch", "torch.compile", "plain PyTorch, fused as one model"):
        model = plain_twin(model)
    if form == "torch.compile":
        return model, torch.compile(model)
    return model, fuse(model) if form.startswith("plain PyTorch, fused") else model


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The replay of a step's CUDA graph. Before the capture the step runs three times, on a side stream."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def with_own_graphs(model: nn.Module, tokens_BT: torch.Tensor) -> Callable[[], None]:
    """The step of `torch.compile` with its own CUDA graphs, which the first calls capture."""
    loss_of, weights = torch.compile(model, mode="reduce-overhead"), tuple(model.parameters())

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        torch.autograd.grad(loss_of(tokens_BT, targets_BT=tokens_BT), weights)

    for _ in range(4):
        step()
    return step


def measured(size: list[str], shape: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """The figures of each form: milliseconds, launches and bytes."""
    tokens_BT = torch.randint(256, shape, device="cuda")  # bytes
    steps: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        model, loss_of = made(form, size)

        def step(
            loss_of: Callable[..., torch.Tensor] = loss_of,
            weights: tuple[nn.Parameter, ...] = tuple(model.parameters()),
        ) -> None:
            torch.autograd.grad(loss_of(tokens_BT, targets_BT=tokens_BT), weights)

        for _ in range(4):
            step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = loss_of(tokens_BT, targets_BT=tokens_BT)
        held = torch.cuda.memory_allocated() - before
        del loss
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        rows[form] = {
            "gpu": sum(event.device_time for event in events) / 1e3,
            "launches": len(events),
            "held": held,
            "peak": peak,
        }
        steps[f"{form}, wall"] = step
        steps[f"{form}, graph"] = captured(step) if form != "torch.compile" else with_own_graphs(model, tokens_BT)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, run in steps.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(STEPS_OF_A_ROUND):
                run()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) / STEPS_OF_A_ROUND * 1e3)
    for name, milliseconds in times.items():
        form, _, kind = name.rpartition(", ")
        rows[form][kind] = statistics.median(milliseconds)
    torch.compiler.reset()
    return rows


def main(folder: Path) -> None:
    """Measure both sizes; each is written when it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {}
    content = {"machine": measured_machine(torch.device("cuda")), "date": date.today().isoformat(), "sizes": sizes}
    for title, size in SIZES.items():
        sizes[title] = measured(*size)
        (folder / "steps.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
