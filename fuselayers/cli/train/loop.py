"""The training loop, a function of (weights, optimizer, step).

A checkpoint holds these three, so a resumed run repeats an uninterrupted one: the batches and the random numbers of a
step follow from the seed and the step.

Legend of the shapes: B sequences of a micro-batch, T tokens of a sequence.
"""

import math
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ..._torch.dispatch import deterministic_algorithms
from ...configs import Config, TrainConfig
from .checkpoint import Content, checkpoints_of, save
from .data import Text, evaluation_batches, seed_generators, training_batch
from .engine import Engine
from .interrupt import noted_signals
from .metrics import Metrics, MetricsFile, peak_memory, show_progress
from .optimizer import build_optimizer, learning_rate
from .state import not_finite, state_of
from .tensorboard import event_files


@dataclass(frozen=True)
class Update:
    """The result of a step."""

    step: int
    learning_rate: float
    _numbers: Tensor
    _copied: torch.cuda.Event | None

    def read(self) -> tuple[float, float]:
        """This process's mean loss in nats per byte, and the norm of the whole gradient before clipping.

        It waits until a GPU has finished this step, but not for later steps.
        """
        if self._copied is not None:
            self._copied.synchronize()
        loss, norm = self._numbers.tolist()
        return loss, norm


class Trainer:
    """A model with its optimizer and its text.

    Args:
        engine: its model takes tokens and targets, int64 [B, T], and returns the mean loss; fused or not, split or not.
    """

    def __init__(
        self, engine: Engine, text: Text, *, config: TrainConfig, sequence_length: int, device: torch.device
    ) -> None:
        self.model = engine.module
        self.engine = engine
        self.text = text
        self.config = config
        self.sequence_length = sequence_length
        self.device = device
        self.step_tokens = config.accumulate * config.batch_size * sequence_length
        self.optimizer = build_optimizer(engine.module, config)

    def step(self, step: int) -> Update:
        """Update the weights once; `step` is 1 for the first. Each process computes its rows of every batch.

        This does not wait for a GPU. The loss and the norm are copied to the host asynchronously.
        """
        config = self.config
        rate = learning_rate(step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = self._gradients(step)
        norm = self.engine.clip(config.clip_norm if config.clip_norm > 0 else math.inf)
        numbers = torch.stack((loss.double(), norm.double())).to("cpu", non_blocking=True)
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(step, rate, numbers, copied)

    def _gradients(self, step: int) -> Tensor:
        """Run forward and backward of a step's micro-batches; return the mean loss of this process."""
        config, engine = self.config, self.engine
        losses = []
        for micro_batch in range(config.accumulate):
            seed_generators(config.seed, step=step, micro_batch=micro_batch, dp_rank=engine.processes.data_rank)
            with engine.micro_batch(last=micro_batch == config.accumulate - 1):
                loss = self.loss(*self.batch(step, micro_batch=micro_batch))
                (loss / config.accumulate).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def batch(self, step: int, *, micro_batch: int = 0) -> tuple[Tensor, Tensor]:
        """This process's rows of a step's tokens and targets, [B / dp, T] each, on the model's device."""
        config = self.config
        size = {"batch_size": config.batch_size, "sequence_length": self.sequence_length}
        tokens_BT, targets_BT = training_batch(
            self.text.train_N, seed=config.seed, step=step, micro_batch=micro_batch, **size
        )
        return self._own_rows(tokens_BT), self._own_rows(targets_BT)

    def _own_rows(self, batch_BT: Tensor) -> Tensor:
        rows_BT = batch_BT[self.engine.processes.rows(len(batch_BT))]
        if self.device.type == "cuda":
            rows_BT = rows_BT.pin_memory()  # else the host waits for the copy
        return rows_BT.to(self.device, non_blocking=True)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss in the run's precision, a float32 scalar."""
        with autocast(self.device, precision=self.config.precision):
            loss: Tensor = self.engine.model(tokens_BT, targets_BT)
        return loss

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The mean loss over the same held-out sequences each time, in eval mode."""
        self.model.eval()
        batches = evaluation_batches(
            self.text.held_out_N,
            num_batches=self.config.evaluate_batches,
            batch_size=self.config.batch_size,
            sequence_length=self.sequence_length,
        )
        losses = [self.loss(self._own_rows(tokens_BT), self._own_rows(targets_BT)) for tokens_BT, targets_BT in batches]
        return self.engine.processes.mean(torch.stack(losses).float().mean().item())


@dataclass(frozen=True)
class Run:
    """A run that is ready to train.

    Attributes:
        config: of the run, with the overrides of this session.
        trainer: with the weights of the checkpoint, if there is one.
        metrics: the curve so far.
        config_yaml: the text of config.yaml.
        done: the steps of earlier sessions.
    """

    config: Config
    trainer: Trainer
    folder: Path
    metrics: MetricsFile
    config_yaml: str
    done: int


class _Curve:
    """Reads updates, in their order, and writes each as a row."""

    def __init__(self, run: Run) -> None:
        self.trainer, self.metrics = run.trainer, run.metrics
        self.seconds_before = self.metrics.rows[-1].seconds if self.metrics.rows else 0.0
        self.started = self.last_end = time.perf_counter()

    def add(self, update: Update, *, validates: bool) -> Metrics:
        """The row of an update, with a validation loss if asked.

        Raises:
            ValueError: a loss or the gradient is not finite.
        """
        own_loss, norm = update.read()
        loss = self.trainer.engine.processes.mean(own_loss)
        check_finite(update.step, {"the loss": loss, "the norm of its gradient": norm})
        seconds = time.perf_counter() - self.last_end
        validation_loss = self.trainer.validation_loss() if validates else None
        check_finite(update.step, {"the validation loss": validation_loss or 0.0})
        row = Metrics(
            step=update.step,
            loss=loss,
            validation_loss=validation_loss,
            learning_rate=update.learning_rate,
            gradient_norm=norm,
            tokens_per_second=self.trainer.step_tokens / seconds,
            seconds=self.seconds_before + time.perf_counter() - self.started,
            peak_memory_bytes=peak_memory(self.trainer.device),
        )
        self.metrics.append(row)
        self.last_end = time.perf_counter()
        return row


def train_steps(run: Run, console: Console) -> tuple[int, int | None]:
    """Run the remaining steps; write the curve and checkpoints, also after the last step or a signal.

    On a GPU the numbers of a step are read after the next step is launched, so that the GPU never waits for the host.

    Returns:
        The last step, and the signal that stopped the run, if any.

    Raises:
        KeyboardInterrupt: a second signal came during a step.
        ValueError: the run diverged; the checkpoints are from before.
    """
    trainer, config, processes = run.trainer, run.config.train, run.trainer.engine.processes
    curve, unread = _Curve(run), deque[Update]()
    logs = config.log and processes.is_main
    with (
        event_files(run.folder / "tensorboard", done=run.done) if logs else nullcontext(lambda row: None) as log,
        noted_signals(second_stops=not processes.launched) as signals,
    ):
        for step in range(run.done + 1, config.steps + 1):
            unread.append(trainer.step(step))
            # A signal may reach one process only, or each at another time. All must stop after the same step.
            signal_number = processes.largest(signals[0] if signals else 0) or None
            last = step == config.steps or signal_number is not None
            saves = last or step % config.checkpoint_every == 0
            validates = step == config.steps or step % config.evaluate_every == 0
            at_once = saves or validates or trainer.device.type == "cpu"
            rows = []
            while len(unread) > (0 if at_once else 1):
                update = unread.popleft()
                rows.append(curve.add(update, validates=validates and update.step == step))
            if saves:
                _save(run, step)
                curve.last_end = time.perf_counter()
            # Printed last: a closed terminal must not stop the writing.
            for row in rows:
                log(row)
                session = run.metrics.rows[run.done :]
                show_progress(console, row, session, steps=config.steps, step_tokens=trainer.step_tokens)
            if last:
                return step, signal_number
    return run.done, None


def _save(run: Run, step: int) -> None:
    """Write a checkpoint.

    Raises:
        ValueError: a weight is not finite. The step's loss cannot show this: it comes before the update.
    """
    trainer, processes = run.trainer, run.trainer.engine.processes
    names = filter(None, processes.gathered(not_finite(trainer.model)))
    check_finite(step, dict.fromkeys(names, math.nan))
    run.metrics.sync()
    content = Content(step, run.config_yaml, trainer.text.fingerprint, [list(astuple(row)) for row in run.metrics.rows])
    tensors, keep = state_of(trainer.model, trainer.optimizer), run.config.train.keep_checkpoints
    save(checkpoints_of(run.folder), tensors, content, keep=keep, processes=processes)


def check_finite(step: int, numbers: dict[str, float]) -> None:
    """Raise ValueError if a number of a step, by its name, is not finite."""
    if not all(map(math.isfinite, numbers.values())):
        said = " and ".join(f"{name} is {number}" for name, number in numbers.items())
        raise ValueError(
            f"training diverged at step {step}: {said}; checkpoints, if any, are from earlier steps; try a lower "
            "train.learning_rate or a longer train.warmup_steps"
        )


def reproducible(device: torch.device) -> AbstractContextManager[None]:
    """Make steps deterministic on the CPU; restore torch's settings afterwards.

    Otherwise compiled code sums the gradient of an embedding with several threads, in any order. On a GPU some of
    torch's kernels have no deterministic implementation, so nothing changes there.
    """
    if device.type != "cpu":
        return nullcontext()
    # Filling fresh memory costs time, and we read none of it.
    return deterministic_algorithms(warn_only=False, fill_memory=False)


def autocast(device: torch.device, *, precision: str) -> torch.autocast:
    """The autocast of a loss. Used by training and by the comparison after it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
