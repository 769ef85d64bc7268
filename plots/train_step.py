"""Measures where the time of a training step of `fuselayers train` goes, in three models with the same weights.

python plots/train_step.py plots/cpu/<processor>    # writes train_step.json there

All figures are medians; the models take turns. Phases are wall time. Kinds of op are the profiler's times of another
step, which includes the profiler's overhead.
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
from fuselayers.components.model.plain_torch import plain_twin

STEPS: Final = 40
BATCH, TOKENS = 8, 128
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"),
    # With its dropout; torch's with dropout are products and a softmax.
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "fuselayers::attention"),
    "dropout masks": ("fuselayers::keep_factors", "fuselayers::dropout", "aten::bernoulli_", "aten::native_dropout"),
}


def models(dropout: float) -> dict[str, nn.Module]:
    """The three models of `fuselayers train`'s table."""
    torch.manual_seed(0)
    fused = fuselayers.build("gpt_nano", ["feedforward=fused_mlp", "fusion=inductor", f"model.dropout={dropout}"])
    eager = fuselayers.build("gpt_nano", ["feedforward=mlp", "fusion=off", f"model.dropout={dropout}"])
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
    """Milliseconds of one step in each kind of op."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for run in steps.values():
            run()
    milliseconds = dict.fromkeys((*KINDS, "the rest"), 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "the rest")
        milliseconds[kind] += event.self_cpu_time_total / 1e3
    return milliseconds


def measure(dropout: float) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by model: of each phase, and of each kind of op."""
    steps = {name: phases(model.train()) for name, model in models(dropout).items()}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    ops: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for number in range(STEPS + 5):
        for name, runs in steps.items():
            of_step = {}
            for phase, run in runs.items():
                started = time.perf_counter()
                run()
                of_step[phase] = 1e3 * (time.perf_counter() - started)
            if number >= 5:
                times[name].append(of_step)
                ops[name].append(kinds(runs))
    return {name: {"phases": medians(times[name]), "ops": medians(ops[name])} for name in steps}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each entry."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


if __name__ == "__main__":
    content = {"machine": measured_machine(torch.device("cpu")), "steps": STEPS, **measure(0.1)}
    content["without dropout"] = measure(0.0)
    (Path(sys.argv[1]) / "train_step.json").write_text(json.dumps(content, indent=2) + "\n")
