"""Measures where the time of a training step of `fuselayers train` goes, in three models of the same weights.

python plots/train_step.py plots/cpu/<processor>    # writes train_step.json and train_step.md there

Phases are medians of wall time, the models in turns. The kinds of op are the profiler's self times of forward and
backward, on all threads' caller, as shares of the step.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fuselayers
from fuselayers.cli.machine import measured_machine
from fuselayers.cli.plain_torch import plain_twin

STEPS: Final = 40
BATCH, TOKENS = 8, 128
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "dropout masks": ("fuselayers::keep_factors", "aten::bernoulli_", "aten::native_dropout"),
}


def models() -> dict[str, nn.Module]:
    """The three models of `fuselayers train`'s table."""
    torch.manual_seed(0)
    fused = fuselayers.build("gpt_nano", ["feedforward=fused_mlp", "fusion=inductor"])
    eager = fuselayers.build("gpt_nano", ["feedforward=mlp", "fusion=off"])
    eager.load_state_dict(fused.state_dict())
    return {"plain PyTorch": plain_twin(eager), "eager layers": eager, "fused": fused}


def phases(model: nn.Module) -> dict[str, Callable[[], None]]:
    """The phases of a step, in order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens_BT = torch.randint(256, (BATCH, TOKENS + 1))
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses[:] = [model(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())]

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.backward(losses),
        "clipping": clip,
        "AdamW": update,
    }


def kinds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Milliseconds of a step in each kind of op."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            for run in steps.values():
                run()
    milliseconds = dict.fromkeys((*KINDS, "the rest"), 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "the rest")
        milliseconds[kind] += event.self_cpu_time_total / 1e3 / STEPS
    return milliseconds


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by model: of each phase, and of each kind of op."""
    steps = {name: phases(model.train()) for name, model in models().items()}
    times: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in runs} for name, runs in steps.items()}
    for number in range(STEPS + 5):
        for name, runs in steps.items():
            for phase, run in runs.items():
                started = time.perf_counter()
                run()
                if number >= 5:
                    times[name][phase].append(1e3 * (time.perf_counter() - started))
    return {
        name: {
            "phases": {phase: statistics.median(one) for phase, one in times[name].items()},
            "ops": kinds(runs),
        }
        for name, runs in steps.items()
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The measurements as a table in Markdown."""
    lines = [f"| ms of a step | {' | '.join(found)} |", "| --- |" + " ---: |" * len(found)]
    for part in ("phases", "ops"):
        for name in next(iter(found.values()))[part]:
            lines.append(f"| {name} | {' | '.join(f'{one[part][name]:.2f}' for one in found.values())} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    machine = measured_machine(torch.device("cpu"))
    result = measure()
    (folder / "train_step.json").write_text(json.dumps({"machine": machine, "steps": STEPS, **result}, indent=2) + "\n")
    (folder / "train_step.md").write_text(f"{machine}, medians of {STEPS} in turns\n\n{table(result)}")
    print(table(result))
