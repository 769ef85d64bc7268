"""`fuselayers train`: a byte-level language model on real text, from config to picture."""

import argparse
import json
import logging
import signal
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ...configs import (
    COMPONENT_SECTIONS,
    Config,
    DataConfig,
    ParallelConfig,
    TrainConfig,
    build,
    compose,
    to_yaml,
)
from ...configs.schemas import section_options
from ...configs.sources import parse_overrides, split_source
from ...configs.values import parse_yaml
from ...partition import FallbackWarning
from ..files import write_text
from ..machine import describe_machine
from ..parser import add_imports, add_overrides
from ..plain import plain_config
from ..text import complain, print_table, say
from . import metrics as metrics_file
from . import plot
from .architecture import check_same_architecture, sequence_length
from .checkpoint import (
    FOLDER_NAME,
    Checkpoint,
    Saver,
    Texts,
    checkpoints_of,
    find_checkpoint,
    newest,
    read_checkpoint,
    run_of,
)
from .compare import EAGER, FUSED, compare, comparison_notes, comparison_rows, unfused_models
from .data import check_length, read_text
from .engine import Processes, device_of, fusion_for, joined_processes, layout_of, start_engine
from .interrupt import Interrupt, exit_code, stops_without_output
from .lock import locked
from .loop import Trainer, reproducible, train_steps
from .metrics import MetricsFile, parse_metrics
from .progress import TrainingProgress
from .sample import sample_text
from .sinks import check_sinks, open_sinks
from .utilisation import utilisation_of

DESCRIPTION = """\
Trains a byte-level language model; by default a small one on the source of Python's standard library.

  fuselayers train                               the default: minutes on two cores
  fuselayers train feedforward=mlp fusion=off    plain eager layers
  fuselayers train llama_tiny                    another model
  fuselayers train data.path=notes/              other text: a file or a folder
  fuselayers train tiny.yaml train.steps=500     a config file, as `build` takes it
  fuselayers train train.resume=runs/<date>      continue from the last checkpoint
  fuselayers train train.resume=runs/<date>/checkpoints/step-000200    or from this one
  fuselayers train --import my_module feedforward=mine    a class of your own
  fuselayers train 'hydra.searchpath=[/my/configs]' model=mine    a group file
  torchrun --nproc-per-node 2 -m fuselayers train parallel=fsdp    over several processes

A run's folder holds the curve (metrics.csv, loss.png), the last checkpoints (checkpoints/step-<number>), config.yaml,
sample.txt, comparison.json, and run.lock, which keeps a second process out.
On Ctrl-C, SIGTERM or a closed terminal a run finishes its step, writes a checkpoint and says how to continue; the exit
code is 0 after SIGTERM, else 128 + the signal."""

_COMPARED_BATCHES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides of the config."""
    add_overrides(
        parser,
        nargs="*",
        metavar="MODEL | FILE | OVERRIDE",
        help="a model or a config file, then group=choice or section.option=value",
    )
    add_imports(parser)
    lines = ["what can be set:"]
    for section, schema in (("train", TrainConfig), ("data", DataConfig), ("parallel", ParallelConfig)):
        lines += [f"  {section + '.' + option.name:<26} {option.doc}" for option in section_options(schema)]
    parser.epilog = "\n".join([*lines, "", "`fuselayers list` shows the options of the model's parts."])


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train as the command line says, over the processes of torchrun if it started this one; see `train`."""
    with joined_processes() as group:
        if group.is_main:
            return train(arguments.overrides, console=console, imports=arguments.imports, processes=group)
        # The others would say the same.
        logging.getLogger("fuselayers").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            return train(arguments.overrides, console=Console(quiet=True), imports=arguments.imports, processes=group)


def train(
    overrides: Sequence[str], *, console: Console, imports: Sequence[str] = (), processes: Processes | None = None
) -> int:
    """Train a model, or continue a run.

    A resumed run takes the config of its checkpoint, with the overrides on top, and writes to the same folder.

    Args:
        overrides: of the config, as Hydra reads them: "model=gpt_nano", "train.steps=200".
        console: where progress and results are printed.
        imports: modules of `--import`, which the hint for resuming repeats.
        processes: of the run, which all call this; None for this one alone. Rank 0 prints and writes.

    Returns:
        The exit code: 0, also after SIGTERM, or 128 + the number of another signal that
        stopped the run: SIGPIPE's where the console can no longer be written.

    Raises:
        ValueError: a wrong override, path, text or checkpoint; the text says what to change.
        OSError: a file cannot be read or written, or another process has the run's folder.
    """
    with ExitStack() as stack:
        return _train(overrides, console=console, imports=imports, stack=stack, processes=processes or Processes())


def _train(
    overrides: Sequence[str], *, console: Console, imports: Sequence[str], stack: ExitStack, processes: Processes
) -> int:
    source, overrides = split_source(overrides)
    asked = compose(source, overrides).train if source else _session(overrides)
    if source and asked.resume:
        raise ValueError(f"a resumed run takes the config of its checkpoint; leave {source} or train.resume out")
    path = find_checkpoint(asked.resume) if asked.resume else None
    run = _run_to_continue(path, asked.output) if path is not None else None
    if run is not None and processes.is_main:
        _lock(run, console=console, stack=stack)
        # The process that held the lock may have written another one in between.
        path = find_checkpoint(asked.resume)
    path = processes.from_main(path)
    new = source or "gpt_nano"
    config, checkpoint = (compose(new, overrides), None) if path is None else _resumed_config(overrides, path)
    device = device_of(config, processes)
    layout = layout_of(config, processes)
    fusion, lowered = fusion_for(config)
    text = read_text(config.data.path, held_out=config.data.held_out, suffixes=config.data.suffixes)
    length = sequence_length(config, text)
    same = processes.from_main(text.fingerprint) == text.fingerprint
    other = processes.first_of(None if same else (processes.rank, text.source))
    if other is not None:
        raise ValueError(
            f"rank {other[0]} reads another text than rank 0 in {other[1]}; set data.path= to a file or a folder that "
            "all machines see"
        )
    check_length(text, sequence_length=length)
    check_sinks(config.train.log)
    utilisation = utilisation_of(config, length=length, device=device, devices=processes.world_size)

    torch.manual_seed(config.train.seed)
    # The engine fuses blocks and models, after it has split them.
    unfused = replace(fusion, scope="none")
    module = build(replace(config, fusion=unfused))
    engine = start_engine(module, config, processes=processes, layout=layout, device=device)
    trainer = Trainer(engine.module, text, config=config.train, sequence_length=length, device=device, engine=engine)
    done, rows = 0, []
    if checkpoint is not None and path is not None:
        rows = parse_metrics(checkpoint.texts.curve, source=f"the curve in the checkpoint {path}")
        trainer.restore(checkpoint, path=path)
        done = checkpoint.step
    folder, metrics, config_yaml = Path(), None, ""
    if processes.is_main:
        if run is not None:
            folder = run
        else:
            folder = _make_folder(config.train.output)
            _lock(folder, console=console, stack=stack)
            if _holds_a_dead_start(folder):
                say(console, f"an earlier start in {folder} ended before its first checkpoint: it is replaced")
        metrics = MetricsFile(folder / metrics_file.FILE_NAME, rows=rows)
        config_yaml = _write_config(config, folder)
    folder = processes.from_main(folder)

    say(
        console,
        f"{config.model.name} of {sum(parameter.numel() for parameter in engine.module.parameters()):,} parameters, "
        f"{config.feedforward.name}, fusion scope {fusion.scope}",
        f"{text.train_N.numel():,} bytes to learn from and {text.held_out_N.numel():,} held out, in {text.num_files} "
        f"{'file' if text.num_files == 1 else 'files'} of {text.source}",
        describe_machine(device),
        utilisation.source,
        f"writing {folder}" + (f", continuing after step {done}" if checkpoint else ""),
        *engine.describe(),
    )
    if lowered is not None:
        say(console, lowered)
    if config.parallel.shard != "none" and not processes.launched:
        launch = "torchrun --nproc-per-node 2 -m fuselayers train"
        say(console, f"one process: parallel.shard={config.parallel.shard} splits nothing; for two, {launch}")
    if fusion.scope != "none":
        say(console, "the first step compiles the model, which takes a while")
    if checkpoint is not None and checkpoint.texts.text_fingerprint != text.fingerprint:
        say(console, "the text is not the checkpoint's: the curve will not be that of an uninterrupted run")

    saver = Saver(checkpoints_of(folder), keep=config.train.keep_checkpoints)

    def save(step: int) -> None:
        curve = "" if metrics is None else metrics.text()  # the texts of rank 0 count
        texts = Texts(config_yaml=config_yaml, text_fingerprint=text.fingerprint, curve=curve)
        saver.save(trainer.state(), step=step, texts=texts)

    # Rank 0 logs for all.
    sinks = config.train.log if processes.is_main else ()
    log = stack.enter_context(open_sinks(sinks, folder, config_yaml=config_yaml, rows=rows))
    with reproducible(device):
        progress = TrainingProgress(console, steps=config.train.steps, done=done)
        outcome = train_steps(
            trainer,
            done=done,
            metrics=metrics,
            progress=progress,
            save=save,
            log=log,
            utilisation=utilisation,
        )
        if metrics is not None:
            title = f"{config.model.name}, {config.feedforward.name}"
            plot.plot_loss(folder / plot.FILE_NAME, metrics.rows, title=title)
        if outcome.signal_number is not None:
            again = "".join(f"--import {module} " for module in imports)
            command = f"{processes.launcher} -m fuselayers train" if processes.launched else "fuselayers train"
            stopped = f"stopped after step {outcome.step}; to continue: {command} {again}train.resume={folder}"
            say(console, stopped)
            if outcome.signal_number == signal.SIGPIPE and processes.is_main:
                complain(f"the output cannot be written any more; {stopped}")
            return exit_code(outcome.signal_number)
        without_output = Interrupt()  # not entered: Ctrl-C ends the comparison as ever
        with stops_without_output(console, without_output):
            _finish(trainer, config, folder=folder, console=console)
        if without_output.signal_number is not None:
            complain(f"the output cannot be written any more; the run has ended, its files are in {folder}")
            return exit_code(without_output.signal_number)
    return 0


def _finish(trainer: Trainer, config: Config, *, folder: Path, console: Console) -> None:
    """The validation loss, a sample, and the fused model beside unfused ones."""
    device, processes = trainer.device, trainer.engine.processes
    say(console, f"validation loss {trainer.validation_loss():.4f} nats per byte; files in {folder}")
    # Every process sends its parts of the weights, one after another; rank 0 alone keeps them, in the CPU's memory.
    weights: dict[str, Any] = {}
    if config.train.sample_bytes or not processes.launched:
        options = StateDictOptions(full_state_dict=True, cpu_offload=processes.launched)
        weights = get_model_state_dict(trainer.model, options=options)
    if not processes.is_main:
        return
    unfused = unfused_models(config, trainer.model, weights=weights, device=device) if weights else {}
    if config.train.sample_bytes:
        text = sample_text(
            unfused[EAGER],
            config.train.sample_bytes,
            seed=config.train.seed,
            device=device,
        )
        write_text(folder / "sample.txt", text)
        say(console, "", "what the model writes:", *(f"  | {line}" for line in text.splitlines()), "")
    if not config.train.compare:
        return
    if processes.launched:
        say(console, "no comparison of eager with fused: it is of one process, and torchrun started this run")
        return
    if plain_config(config) == config:
        say(console, "no comparison of eager with fused: nothing in this model is fused")
        return
    batches = [trainer.batch(config.train.steps + 1 + index) for index in range(_COMPARED_BATCHES)]
    models = {**unfused, FUSED: trainer.model}
    result = compare(models, batches, precision=config.train.precision, device=device)
    write_text(folder / "comparison.json", json.dumps(asdict(result), indent=2))
    say(console, _comparison_title(config, batches[0][0]))
    print_table(console, comparison_rows(result))
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


def _session(overrides: Sequence[str]) -> TrainConfig:
    """`train.resume` and `train.output` of the overrides and of the files that they choose."""
    # Leave out the overrides of the model: they may fit only the checkpoint's model.
    layers = [(text, parse_overrides([text])) for text in overrides]
    return compose(
        overrides=[
            text
            for text, layer in layers
            if (layer.choices.keys() | layer.settings.keys()).isdisjoint(COMPONENT_SECTIONS)
        ]
    ).train


def _resumed_config(overrides: Sequence[str], path: Path) -> tuple[Config, Checkpoint]:
    """The config of a resumed run, and its checkpoint."""
    checkpoint = read_checkpoint(path)
    try:
        content = parse_yaml(checkpoint.texts.config_yaml.encode(errors="replace"), "config_yaml")
        saved = compose(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the config in the checkpoint {path} does not compose: {error}") from error
    config = compose(content, overrides)
    check_same_architecture(saved, config, path=path)
    if checkpoint.step > config.train.steps:
        raise ValueError(
            f"the checkpoint {path} is of step {checkpoint.step}, beyond train.steps={config.train.steps}; "
            "there is nothing left to train"
        )
    return config, checkpoint


def _run_to_continue(checkpoint: Path, output: str) -> Path | None:
    """The folder of a checkpoint's run, unless `train.output` is another one or the checkpoint was copied elsewhere."""
    run = run_of(checkpoint)
    if run is None or not checkpoint.is_dir():
        return None
    folder = Path(output).expanduser() if output else run
    return run if folder.exists() and folder.samefile(run) else None


def _lock(folder: Path, *, console: Console, stack: ExitStack) -> None:
    if not stack.enter_context(locked(folder)):
        say(console, f"the file system of {folder} has no locks: let no second process write there")


def _make_folder(output: str) -> Path:
    """Make the folder of a run; a new one below runs/ where none is named."""
    folder = Path(output).expanduser() if output else Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 2
    while not output and folder.exists():
        folder = folder.with_name(f"{folder.name.partition('+')[0]}+{number}")
        number += 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder of the run, {folder}: {error.strerror}; set train.output=") from error
    return folder


def _holds_a_dead_start(folder: Path) -> bool:
    """Whether a run began here and wrote no checkpoint, so that nothing is lost with it.

    Raises:
        FileExistsError: the folder holds another run.
    """
    # loss.png is of a run that ended, and whose checkpoints somebody deleted.
    checkpoint = newest(checkpoints_of(folder))
    held = f"{FOLDER_NAME}/{checkpoint.name}" if checkpoint is not None else plot.FILE_NAME
    if checkpoint is not None or (folder / plot.FILE_NAME).exists():
        raise FileExistsError(
            f"{folder} already holds a run ({held}); continue it with train.resume={folder}, or choose another "
            "train.output="
        )
    return (folder / metrics_file.FILE_NAME).exists()


def _write_config(config: Config, folder: Path) -> str:
    """Save the resolved config, without `output` and `resume`, which belong to one session."""
    text = to_yaml(replace(config, train=replace(config.train, output="", resume="")))
    write_text(folder / "config.yaml", text)
    return text
