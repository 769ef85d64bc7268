"""`fuselayers train`: a byte-level language model on real text, from config to picture."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import torch
import yaml
from rich.console import Console

from ...configs import COMPONENT_SECTIONS, Config, DataConfig, TrainConfig, build, compose, to_yaml
from ...configs.schemas import section_options
from ...configs.sources import parse_overrides
from ...partition import warm_up
from ..files import write_text, write_whole
from ..machine import choose_device, describe_machine
from ..plain import plain_config
from ..text import say
from . import metrics as metrics_file
from . import plot
from .architecture import check_same_architecture, sequence_length
from .checkpoint import FILE_NAME, Checkpoint, find_checkpoint, read_checkpoint, write_checkpoint
from .compare import EAGER, FUSED, compare, comparison_notes, comparison_table, unfused_models
from .data import check_length, read_text
from .loop import Trainer, reproducible, train_steps
from .metrics import MetricsFile
from .progress import TrainingProgress
from .sample import sample_text

SUMMARY = "train a language model on text, or continue a run"
DESCRIPTION = """\
Trains a byte-level language model; by default a small one on the source of Python's standard library.

  fuselayers train                                    the default run, a few minutes on two cores
  fuselayers train feedforward=mlp fusion=off         the same of plain eager layers
  fuselayers train data.path=notes/ train.steps=500   on other text
  fuselayers train train.resume=runs/<date>           continue a run from its last checkpoint
  fuselayers train --import my_module feedforward=mine              a class that my_module.py registers
  fuselayers train 'hydra.searchpath=[/my/configs]' model=mine      a group file of your own

A run's folder holds the curve (metrics.csv, loss.png), checkpoint.pt, config.yaml, sample.txt and comparison.json.
Ctrl-C finishes the step, writes a checkpoint and says how to continue."""

_COMPARED_BATCHES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides of the config."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="group=option or section.key=value")
    lines = ["what can be set:"]
    for section, schema in (("train", TrainConfig), ("data", DataConfig)):
        lines += [f"  {section + '.' + option.name:<26} {option.doc}" for option in section_options(schema)]
    parser.epilog = "\n".join([*lines, "", "`fuselayers list` shows the options of the model's parts."])


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train as the command line says; see `train`."""
    # A resumed run gives the bits of an uninterrupted one: no measured time changes the backend.
    with warm_up(math.inf):
        return train(arguments.overrides, console=console, imports=arguments.imports)


def train(overrides: Sequence[str], *, console: Console, imports: Sequence[str] = ()) -> int:
    """Train a model, or continue a run.

    A resumed run takes the config of its checkpoint, with the overrides on top, and writes to the same folder.

    Args:
        overrides: of the config, as Hydra reads them: "model=gpt_nano", "train.steps=200".
        console: where progress and results are printed.
        imports: modules of `--import`, which the hint for resuming repeats.

    Returns:
        The exit code: 0, or 128 + the number of the signal that stopped the run.

    Raises:
        ValueError: a wrong override, path, text or checkpoint; the text says what to change.
        OSError: a file cannot be read or written.
    """
    config, path, checkpoint = _config(overrides)
    length = sequence_length(config)
    device = choose_device(config.train.device, setting="train.device")
    text = read_text(config.data.path, held_out=config.data.held_out, suffixes=config.data.suffixes)
    check_length(text, sequence_length=length)

    torch.manual_seed(config.train.seed)
    model = build(config).to(device)
    trainer = Trainer(model, text, config=config.train, sequence_length=length, device=device)
    done = 0
    if checkpoint is not None and path is not None:
        trainer.restore(checkpoint, path=path)
        done = checkpoint.step
    folder = _run_folder(config.train.output, checkpoint_path=path)
    config_yaml = _write_config(config, folder)
    metrics = _metrics(folder, checkpoint_path=path, done=done)

    say(
        console,
        f"{config.model.name} of {sum(parameter.numel() for parameter in model.parameters()):,} parameters, "
        f"{config.feedforward.name}, fusion scope {config.fusion.scope}",
        f"{text.train_N.numel():,} bytes to learn from and {text.held_out_N.numel():,} held out, in {text.num_files} "
        f"{'file' if text.num_files == 1 else 'files'} of {text.source}",
        describe_machine(device),
        f"writing {folder}" + (f", continuing after step {done}" if checkpoint else ""),
    )
    if config.fusion.scope != "none":
        say(console, "the first step compiles the model, which takes a while")
    if checkpoint is not None and checkpoint.text_fingerprint != text.fingerprint:
        say(console, "the text is not the checkpoint's: the curve will not be that of an uninterrupted run")

    def save(step: int) -> None:
        write_checkpoint(folder / FILE_NAME, trainer.checkpoint(step, config_yaml=config_yaml))

    with reproducible(device):
        progress = TrainingProgress(console, steps=config.train.steps, done=done)
        outcome = train_steps(trainer, done=done, metrics=metrics, progress=progress, save=save)
        plot.plot_loss(folder / plot.FILE_NAME, metrics.rows, title=f"{config.model.name}, {config.feedforward.name}")
        if outcome.signal_number is not None:
            again = "".join(f"--import {module} " for module in imports)
            say(
                console,
                f"stopped after step {outcome.step}; to continue: fuselayers train {again}train.resume={folder}",
            )
            return 128 + outcome.signal_number
        _finish(trainer, config, folder=folder, console=console)
    return 0


def _finish(trainer: Trainer, config: Config, *, folder: Path, console: Console) -> None:
    """The validation loss, a sample, and the fused model beside unfused ones."""
    device = trainer.device
    say(console, f"validation loss {trainer.validation_loss():.4f} nats per byte; files in {folder}")
    unfused = unfused_models(config, trainer.model, device=device)
    if config.train.sample_bytes:
        text = sample_text(unfused[EAGER], config.train.sample_bytes, seed=config.train.seed, device=device)
        write_text(folder / "sample.txt", text)
        say(console, "", "what the model writes:", *(f"  | {line}" for line in text.splitlines()), "")
    if not config.train.compare:
        return
    if plain_config(config) == config:
        say(console, "no comparison of eager with fused: nothing in this model is fused")
        return
    batches = [trainer.batch(config.train.steps + 1 + index) for index in range(_COMPARED_BATCHES)]
    models = {**unfused, FUSED: trainer.model}
    result = compare(models, batches, precision=config.train.precision, device=device)
    write_text(folder / "comparison.json", json.dumps(asdict(result), indent=2))
    say(console, _comparison_title(config, batches[0][0]))
    console.print(comparison_table(result), highlight=False)
    say(console, *comparison_notes(result))


def _comparison_title(config: Config, tokens_BT: torch.Tensor) -> str:
    sequences, length = tokens_BT.shape
    scope, backend = config.fusion.scope, config.fusion.backend
    fusion = f"fusion {backend} of scope {scope}" if scope != "none" else "without the fusion core"
    return (
        f"the trained model, {sequences} x {length} bytes, {config.train.precision}, dropout "
        f"{config.model.options['dropout']}: as one writes it in PyTorch, of this library's eager layers "
        f"({plain_config(config).feedforward.name}), and fused ({config.feedforward.name}, {fusion})"
    )


def _config(overrides: Sequence[str]) -> tuple[Config, Path | None, Checkpoint | None]:
    """The config of a run; of a resumed run also the path of the checkpoint, and the checkpoint."""
    resume = _resume(overrides)
    if not resume:
        return compose(overrides=overrides), None, None
    path = find_checkpoint(resume)
    checkpoint = read_checkpoint(path)
    content = yaml.safe_load(checkpoint.config_yaml)
    try:
        saved = compose(content)
    except ValueError as error:
        raise ValueError(f"the config in the checkpoint {path} does not compose: {error}") from error
    config = compose(content, overrides)
    check_same_architecture(saved, config, path=path)
    if checkpoint.step > config.train.steps:
        raise ValueError(
            f"the checkpoint {path} is of step {checkpoint.step}, beyond train.steps={config.train.steps}; "
            "there is nothing left to train"
        )
    return config, path, checkpoint


def _resume(overrides: Sequence[str]) -> str:
    """The `train.resume` of the overrides and of the files that they choose."""
    # Leave out the overrides of the model: they may fit only the checkpoint's model.
    layers = [(text, parse_overrides([text])) for text in overrides]
    return compose(
        overrides=[
            text
            for text, layer in layers
            if (layer.choices.keys() | layer.settings.keys()).isdisjoint(COMPONENT_SECTIONS)
        ]
    ).train.resume


def _run_folder(output: str, *, checkpoint_path: Path | None) -> Path:
    """Make the folder of a run.

    Raises:
        FileExistsError: it holds another run.
    """
    if not output:
        if checkpoint_path is not None:
            return checkpoint_path.parent
        folder = Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        number = 2
        while folder.exists():
            folder = folder.with_name(f"{folder.name.partition('+')[0]}+{number}")
            number += 1
    else:
        folder = Path(output).expanduser()
    resumed_here = checkpoint_path is not None and folder.exists() and folder.samefile(checkpoint_path.parent)
    if not resumed_here:
        held = [name for name in (FILE_NAME, metrics_file.FILE_NAME) if (folder / name).exists()]
        if held:
            raise FileExistsError(
                f"{folder} already holds a run ({held[0]}); continue it with train.resume={folder}, or choose another "
                "train.output="
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder of the run, {folder}: {error.strerror}; set train.output=") from error
    return folder


def _metrics(folder: Path, *, checkpoint_path: Path | None, done: int) -> MetricsFile:
    """The curve up to the checkpoint; a run resumed in another folder copies its curve."""
    path = folder / metrics_file.FILE_NAME
    if checkpoint_path is not None and not path.exists():
        source = checkpoint_path.parent / metrics_file.FILE_NAME
        if source.exists():
            content = source.read_bytes()
            write_whole(path, lambda file: file.write(content))
    return MetricsFile(path, after_step=done)


def _write_config(config: Config, folder: Path) -> str:
    """Save the resolved config, without `output` and `resume`, which belong to one session."""
    text = to_yaml(replace(config, train=replace(config.train, output="", resume="")))
    write_text(folder / "config.yaml", text)
    return text
