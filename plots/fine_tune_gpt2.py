"""Fine-tunes the GPT-2 of docs/fine_tune_gpt2.md before and after `swap`, and draws the losses and the bytes.

python plots/fine_tune_gpt2.py measure FOLDER   # writes FOLDER/fine_tune_gpt2.json, and draws it
python plots/fine_tune_gpt2.py draw FOLDER      # draws FOLDER/fine_tune_gpt2.svg again, from the file alone
"""

import copy
import json
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, Final

import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from torch import nn

import fuselayers
from fuselayers.cli.machine import measured_machine
from fuselayers.partition import saved_bytes

__all__ = ["draw", "measure"]

STEPS: Final = 300
NAME: Final = "fine_tune_gpt2"
_COLOURS: Final = {"plain": "#808080", "layers": "#2e86ab", "blocks": "#d1495b"}


def examples() -> torch.Tensor:
    """The source of Python's json in bytes, [examples, 64]."""
    source = b"".join(file.read_bytes() for file in sorted(Path(json.__file__).parent.glob("*.py")))
    tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    return tokens[: len(tokens) // 64 * 64].view(-1, 64)


def model(dropout: float) -> nn.Module:
    """The GPT-2 of the page."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    torch.manual_seed(0)
    made: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    return made


def train(network: nn.Module) -> list[float]:
    """The losses of all steps of the page's Trainer."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(network, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in examples()])
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def measure() -> dict[str, Any]:
    """Losses of each step, and bytes saved for backward of a batch of 8, of the plain and the swapped models."""
    batch = {"input_ids": examples()[:8], "labels": examples()[:8]}
    losses: dict[str, list[float]] = {}
    saved: dict[str, dict[str, int]] = {}
    for dropout in (0.0, 0.1):
        plain = model(dropout).train()
        saved_by_level = {}
        for level in ("plain", "layers", "blocks"):
            network = copy.deepcopy(plain)
            if level != "plain":
                fuselayers.swap(network, level=level, batch=batch)
            saved_by_level[level] = saved_bytes(network.train(), **batch)
            if dropout == 0.0:
                losses[level] = train(network)
        saved[f"dropout {dropout}"] = saved_by_level
    import transformers

    versions = f"transformers {transformers.__version__}"
    machine = f"{measured_machine(torch.device('cpu'))}, {versions}"
    return {"machine": machine, "date": date.today().isoformat(), "losses": losses, "saved_bytes": saved}


def draw(folder: Path) -> Path:
    """Draw FOLDER/fine_tune_gpt2.svg from the file of the same name, and return its path."""
    content = json.loads((folder / f"{NAME}.json").read_text())
    figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="none")
    curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    styles = {"plain": (4.0, "-"), "layers": (1.8, "-"), "blocks": (1.2, ":")}
    for level, losses in content["losses"].items():
        width, style = styles[level]
        curve.plot(
            range(1, len(losses) + 1), losses, label=level, color=_COLOURS[level], linewidth=width, linestyle=style
        )
    curve.set_xlabel("step")
    curve.set_ylabel("loss, dropout 0")
    curve.legend(frameon=False, labelcolor="#808080")
    for index, (level, colour) in enumerate(_COLOURS.items()):
        kilobytes = [saved[level] / 1e3 for saved in content["saved_bytes"].values()]
        drawn = bars.bar(
            [number + (index - 1) * 0.27 for number in range(len(kilobytes))], kilobytes, 0.25, color=colour
        )
        bars.bar_label(drawn, [f"{value:,.0f}" for value in kilobytes], fontsize=7, color="#808080")
    bars.set_xticks(range(len(content["saved_bytes"])), list(content["saved_bytes"]))
    bars.set_ylabel("kB saved for backward")
    for axes in (curve, bars):
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#808080")
        axes.tick_params(colors="#808080")
        axes.xaxis.label.set_color("#808080")
        axes.yaxis.label.set_color("#808080")
    picture = folder / f"{NAME}.svg"
    FigureCanvasSVG(figure).print_svg(picture, metadata={"Date": None})
    return picture


if __name__ == "__main__":
    target = Path(sys.argv[2])
    if sys.argv[1] == "measure":
        (target / f"{NAME}.json").write_text(json.dumps(measure(), indent=1) + "\n")
    print(draw(target))
