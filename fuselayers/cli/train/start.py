"""The start of a run: its config, its folder, its text, its model."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from ...configs import COMPONENT_SECTIONS, Config, build, compose, to_yaml
from ...configs.build import split_source
from ...partition import machine_of
from ...partition.choose.machine import named_with_file
from ..files import write_text
from ..machine import describe_machine
from ..text import say
from .checkpoint import FOLDER_NAME, Content, checkpoints_of, config_of, find_checkpoint, listed, run_of
from .data import VOCAB_SIZE, Text, read_text
from .engine import Processes, device_of, fusion_of, grouped, start_engine, with_cuda_graphs
from .lock import locked
from .loop import Run, Trainer
from .metrics import FILE_NAME, HEADER, Metrics, MetricsFile
from .plot import FILE_NAME as PICTURE
from .state import load_state


def start_run(overrides: Sequence[str], *, console: Console, stack: ExitStack, processes: Processes) -> Run:
    """Start a new run or continue one, lock its folder, and print what it is.

    Args:
        overrides: of the config; the first may also be a file or the name of a model.
        stack: holds the lock.

    Raises:
        ValueError: a wrong override, path, text or checkpoint; the text says what to change.
        OSError: a file cannot be read or written, or another process has the run's folder.
    """
    source, overrides = split_source(overrides)
    # The overrides of the model may fit only the checkpoint's model.
    session = compose(overrides=[text for text in overrides if text.startswith(("train", "hydra"))]).train
    if source and session.resume:
        raise ValueError(f"a resumed run uses the config of its checkpoint; leave {source} or train.resume out")
    checkpoint, folder = None, None
    if session.resume:
        folder = run_of(session.resume)
        if folder and session.output and Path(session.output).expanduser().resolve() != folder.resolve():
            folder = None
        if folder is not None and processes.is_main:
            stack.enter_context(locked(folder))
        checkpoint = find_checkpoint(session.resume, processes)
    config = compose(source or "gpt_nano", overrides) if checkpoint is None else _resumed(*checkpoint, overrides)
    trainer = _trainer(config, processes)
    done, rows = 0, []
    if checkpoint is not None:
        path, content = checkpoint
        rows = [Metrics(*row) for row in content.curve]
        load_state(trainer.model, trainer.optimizer, path)
        done = content.step
    if folder is None:
        folder = processes.from_main(_new_folder(config.train.output, stack) if processes.is_main else Path())
    metrics = MetricsFile(folder / FILE_NAME if processes.is_main else None, rows=rows)
    config_yaml = to_yaml(replace(config, train=replace(config.train, output="", resume="")))
    if processes.is_main:
        write_text(folder / "config.yaml", config_yaml)
    run = Run(config, trainer, folder, metrics, config_yaml, done)
    _describe(run, console, None if checkpoint is None else checkpoint[1])
    return run


def sequence_length(config: Config, text: Text) -> int:
    """The number of tokens of a training sequence.

    Raises:
        ValueError: the model cannot predict the next token of the text, or its context is shorter than
            `data.sequence_length`; or the training or the held-out text is not longer than a sequence.
    """
    model = config.model
    if model.name != "decoder":
        raise ValueError(
            f"train needs a model that predicts the next token, a decoder; model.name is {model.name!r}; "
            "use model=gpt_nano, gpt2_small or llama_tiny"
        )
    vocab_size, context_length = int(model.options["vocab_size"]), int(model.options["context_length"])
    if vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size must be at least {VOCAB_SIZE} to hold every byte of {text.source}, got {vocab_size}; "
            f"add model.vocab_size={VOCAB_SIZE}"
        )
    length = config.data.sequence_length or context_length
    if length > context_length:
        raise ValueError(
            f"data.sequence_length must be at most model.context_length, {context_length}, got {length}; "
            "lower the first or raise the second"
        )
    for part, text_N in (("training", text.train_N), ("held-out", text.held_out_N)):
        if text_N.numel() <= length:
            raise ValueError(
                f"the {part} text must be longer than a sequence of {length} bytes, got {text_N.numel()} bytes from "
                f"{text.source}; give more text (data.path=) or a smaller data.sequence_length="
            )
    return length


def _resumed(path: Path, content: Content, overrides: Sequence[str]) -> Config:
    """The config of a checkpoint, with the overrides of this session."""
    saved = config_of(path, content)
    config = compose(saved, overrides)
    # Equal shapes of the weights are not enough: four heads have weights of the same shapes as eight.
    changed = [name for name in COMPONENT_SECTIONS if getattr(config, name) != getattr(saved, name)]
    if changed:
        raise ValueError(
            f"a run resumed from {path} cannot change {changed[0]}; remove its overrides, or start a new run without "
            "train.resume="
        )
    if content.step > config.train.steps:
        raise ValueError(
            f"the checkpoint {path} is of step {content.step}, beyond train.steps={config.train.steps}; "
            "raise train.steps, or resume from an earlier checkpoint"
        )
    return config


def _trainer(config: Config, processes: Processes) -> Trainer:
    device = device_of(config, processes)
    processes, fusion = grouped(config, processes), fusion_of(config)
    text = read_text(config.data.path, held_out=config.data.held_out, suffixes=config.data.suffixes)
    length = sequence_length(config, text)
    if len(set(processes.gathered(text.fingerprint))) > 1:
        raise ValueError(
            "the processes read different texts; set data.path= to a file or a folder that all machines see"
        )
    torch.manual_seed(config.train.seed)
    # The engine fuses blocks and models after it splits them.
    unfused = replace(fusion, scope="none")
    module = build(replace(config, fusion=unfused))
    engine = start_engine(module, config, processes=processes, device=device)
    return Trainer(engine, text, config=config.train, sequence_length=length, device=device)


def _new_folder(output: str, stack: ExitStack) -> Path:
    """Make and lock the folder of a run; by default a new one in runs/.

    Raises:
        FileExistsError: it holds a run. A run without a checkpoint may be replaced.
    """
    folder = Path(output).expanduser() if output else Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(locked(folder))
    held = [f"{FOLDER_NAME}/{path.name}" for _, path in listed(checkpoints_of(folder))]
    curve = folder / FILE_NAME
    if curve.exists() and not curve.read_bytes().startswith(HEADER.encode()):  # a table that the user made
        held.append(FILE_NAME)
    if (folder / PICTURE).exists():  # of a finished run whose checkpoints were deleted
        held.append(PICTURE)
    if held:
        raise FileExistsError(
            f"{folder} already holds a run ({held[0]}); continue it with train.resume={folder}, or choose another "
            "train.output="
        )
    return folder


def _describe(run: Run, console: Console, resumed: Content | None) -> None:
    config, trainer = run.config, run.trainer
    engine, text = trainer.engine, trainer.text
    fusion, no_graphs = with_cuda_graphs(fusion_of(config), processes=engine.processes, device=trainer.device)
    say(
        console,
        f"{config.model.name} of {sum(parameter.numel() for parameter in engine.module.parameters()):,} parameters, "
        f"{config.feedforward.name}, fusion scope {fusion.scope}",
        f"{text.train_N.numel():,} bytes to learn from and {text.held_out_N.numel():,} held out, in {text.num_files} "
        f"{'file' if text.num_files == 1 else 'files'} of {text.source}",
        describe_machine(trainer.device),
        f"writing {run.folder}" + (f", continuing after step {run.done}" if resumed else ""),
    )
    processes, shard = engine.processes, config.parallel.shard
    if processes.launched:
        say(console, f"{processes.world_size} processes, dp {processes.dp} x tp {processes.tp}, shard {shard}")
    elif shard != "none":
        say(console, f"one process, so {shard} splits nothing; torchrun starts more")
    if no_graphs is not None and trainer.device.type == "cuda":
        say(console, f"without CUDA graphs: {no_graphs}")
    if fusion.scope != "none":
        say(console, "the first step compiles the model, which takes a while")
        machine = machine_of(trainer.device.type)
        if (prices := named_with_file(machine)) != machine.name:
            say(console, f"what is saved is chosen by the prices of {prices}")
    if resumed is not None and resumed.text_fingerprint != text.fingerprint:
        say(console, "the text differs from the checkpoint's, so the curve will differ from an uninterrupted run")
