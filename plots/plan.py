"""Plans the example of docs/scale.md, and published trainings, which could not be repeated here.

python plots/plan.py        # writes plots/plan/published.json, in two minutes
python -m docs.figures      # writes it into the page

torchtitan: github.com/pytorch/torchtitan at b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, and
asyncTP_llama3_h100_2025-06_torchtitan.md (bfloat16, vanilla). Its H100 has 96 GB at 2.4 TB/s and 500 W.
MPT 7B: github.com/mosaicml/llm-foundry at 8c8dd48, scripts/train/benchmarking/README.md.
"""

import contextlib
import functools
import io
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from fuselayers.cli.main import main
from fuselayers.cli.plan.command import efficiency_of
from fuselayers.cli.plan.model import PlannedModel, planned_model
from fuselayers.cli.plan.step import plan_of
from fuselayers.configs import compose
from fuselayers.hardware import GPUS

__all__ = ["DATA", "EXAMPLE", "RUNS", "Run", "planned", "printed"]

DATA: Final = Path(__file__).parent / "plan" / "published.json"
EXAMPLE: Final = ("plan", "model=llama3_8b", "gpus=8")


@dataclass(frozen=True)
class Run:
    """A published training.

    Attributes:
        title: the title of its row in the page.
        tokens_per_second: for each GPU, as published.
        model: "llama", or for MPT 7B the tokens of a sequence.
        batch: sequences in a micro-batch.
        gpus: the number of data-parallel GPUs.
        gpu: the kind of GPU.
        tp: the number of GPUs in a tensor-parallel group.
        checkpointing: as `parallel.checkpointing`: "none", "selective" or "block".
        eager: whether nothing is compiled.
        gibibytes: memory of a GPU, as published.
    """

    title: str
    tokens_per_second: int
    model: str
    batch: int
    gpus: int
    gpu: str = "H100"
    tp: int = 1
    checkpointing: str = "none"
    eager: bool = False
    gibibytes: float | None = None


_llama: Final = functools.partial(Run, model="llama", batch=2, checkpointing="selective")
RUNS: Final = (
    _llama("Llama 3.1 8B, 8 H100, batch 2, selective checkpointing, eager [1]", 5762, gpus=8, eager=True),
    _llama("128 H100, eager [1]", 5605, gpus=128, eager=True),
    _llama("8 H100, `torch.compile` [1]", 6667, gpus=8, gibibytes=77.0),
    _llama("128 H100, `torch.compile` [1]", 6514, gpus=128, gibibytes=62.0),
    _llama(
        "Llama 3 8B, 64 H100, FSDP 8 x TP 8, batch 12, selective, `torch.compile` [2]", 4378, batch=12, gpus=8, tp=8
    ),
    Run("MPT 7B, 2,048 tokens, 8 A100, batch 6 [3]", 4641, "2048", 6, 8, gpu="A100"),
    Run("MPT 7B, 2,048 tokens, 8 H100, batch 6 [3]", 10643, "2048", 6, 8),
    Run("the same, 128 H100", 10475, "2048", 6, 128),
    Run("the same, 512 H100", 9670, "2048", 6, 512),
    Run("MPT 7B, 8,192 tokens, 8 A100, batch 8, blocks recomputed [3]", 3206, "8192", 8, 8, "A100", 1, "block"),
    Run("the same, 8 H100", 6935, "8192", 8, 8, checkpointing="block"),
)


def planned() -> list[dict[str, Any]]:
    """Return every run with the tokens per second and GPU, and the GiB of a GPU, that the plan predicts."""
    rows = []
    for run in RUNS:
        hardware = GPUS[run.gpu]
        if run.model == "llama":
            hardware = replace(hardware, memory=96e9, bandwidth=2.4e12)
        asked = {"dp": run.gpus, "tp": run.tp, "sequence": run.tp > 1, "shard": "fsdp"}
        layout = compose({"parallel": {**asked, "checkpointing": run.checkpointing}}).parallel
        model = _model(run.model, run.checkpointing, run.eager)
        plan = plan_of(model, hardware, layout, batch=run.batch, efficiency=efficiency_of(run.gpu))
        predicted = {"tokens_per_second": plan.tokens_per_second, "gibibytes": plan.memory.total / 2**30}
        rows.append({**asdict(run), "predicted": predicted})
    return rows


@functools.cache
def _model(name: str, checkpointing: str, eager: bool) -> PlannedModel:
    if name == "llama":
        source, overrides = "llama3_8b", ["model.loss=plain", *(["fusion=off"] if eager else [])]
    else:
        sizes = ["model.hidden_dim=4096", "model.num_layers=32", f"model.context_length={name}"]
        shape = ["model.vocab_size=50368", "attention.num_heads=32", "model.dropout=0", "feedforward=mlp"]
        plain = ["attention.bias=false", "feedforward.bias=false", "norm.bias=false", "fusion=off"]
        source, overrides = "gpt2_small", [*sizes, *shape, *plain]
    asked = ["train.precision=bfloat16", f"parallel.checkpointing={checkpointing}"]
    return planned_model(compose(source, [*overrides, *asked]))


def printed() -> str:
    """Return what the command of the example prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(EXAMPLE) == 0
    return out.getvalue().strip()


if __name__ == "__main__":
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps({"runs": planned(), "example": printed()}, indent=1) + "\n")
