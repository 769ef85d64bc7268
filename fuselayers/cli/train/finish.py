"""The end of a run: its validation loss, a sample of text, and a comparison of the fused model with unfused ones."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import torch
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..bench.report import table
from ..files import write_text
from ..plain import plain_config
from ..text import print_table, say
from .compare import COMPRESSED, compare, compared_models, comparison_notes, eager_model
from .loop import Run

_COMPARED_BATCHES: Final = 8
_TEMPERATURE: Final = 0.8
_PROMPT: Final = b"\n"


def finish(run: Run, console: Console) -> None:
    """Print the end of a run, and write sample.txt and comparison.json; every process calls it."""
    config, trainer, folder = run.config, run.trainer, run.folder
    device, processes = trainer.device, trainer.engine.processes
    say(console, f"validation loss {trainer.validation_loss():.4f} nats per byte; files in {folder}")
    # Every process sends its parts of the weights, one after another; rank 0 alone keeps them, in the CPU's memory.
    weights: dict[str, Any] = {}
    if config.train.sample_bytes or not processes.launched:
        options = StateDictOptions(full_state_dict=True, cpu_offload=processes.launched)
        weights = get_model_state_dict(trainer.model, options=options)
    if not processes.is_main:
        return
    eager = eager_model(config, weights=weights, device=device) if weights else trainer.model
    if config.train.sample_bytes:
        text = sample_text(eager, config.train.sample_bytes, seed=config.train.seed, device=device)
        write_text(folder / "sample.txt", text)
        say(console, "", "what the model writes:", *_quoted(text, console.width), "")
    if not config.train.compare:
        return
    reason = "torchrun started this run" if processes.launched else ""
    reason = reason or ("nothing in this model is fused" if plain_config(config) == config else "")
    if reason:
        say(console, f"no comparison of eager with fused: {reason}")
        return
    batches = [trainer.batch(config.train.steps + 1 + index) for index in range(_COMPARED_BATCHES)]
    models = compared_models(config, trainer.model, eager, weights=weights, device=device)
    precision, seconds = config.train.precision, _compile_seconds(run)
    result = compare(models, batches, precision=precision, device=device, compile_seconds=seconds)
    write_text(folder / "comparison.json", json.dumps(asdict(result), indent=2))
    sequences, length = batches[0][0].shape
    fusion = "without the fusion core" if config.fusion.scope == "none" else f"fusion {config.fusion.backend}"
    say(
        console,
        f"the trained model, {sequences} x {length} bytes, {precision}, dropout {config.model.options['dropout']}: in "
        f"plain PyTorch, in this library's eager layers ({plain_config(config).feedforward.name}), and "
        f"fused ({config.feedforward.name}, {fusion}){', also in int8' if COMPRESSED in models else ''}",
    )
    print_table(console, table(result.rows))
    say(console, *comparison_notes(result))


def _quoted(text: str, width: int) -> Iterator[str]:
    for line in text.splitlines():
        # Not by words: the text shows what the model has learnt about spaces.
        yield from (f"  | {line[start : start + width - 4]}" for start in range(0, max(len(line), 1), width - 4))


def _compile_seconds(run: Run) -> float | None:
    """The time of the session's first step minus the median of the others; None without compiling or other steps."""
    seconds = [run.trainer.step_tokens / row.tokens_per_second for row in run.metrics.rows[run.done :]]
    if run.config.fusion.scope == "none" or len(seconds) < 3:
        return None
    return seconds[0] - statistics.median(seconds[1:])


def sample_text(model: Any, num_bytes: int, *, seed: int, device: torch.device) -> str:
    """Return text that a decoder writes after a line break, safe to print, drawn by a separate generator.

    A vocabulary may be larger than a byte; tokens that are no byte are replaced.
    """
    prompt_BT = torch.tensor([list(_PROMPT)], device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        tokens_BT = model.eval().generate(prompt_BT, num_bytes, temperature=_TEMPERATURE, generator=generator)
    tokens = tokens_BT[0, len(_PROMPT) :].tolist()
    text = bytes(token if token < 256 else 0 for token in tokens).decode("utf-8", errors="replace")
    # An escape sequence could change the terminal.
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
