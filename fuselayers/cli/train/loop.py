"""The training loop, a function of (weights, optimizer, step).

A checkpoint holds these three, so a resumed run repeats an uninterrupted one: the batches and the random numbers of a
step follow from the seed and the step.

Legend of the shapes: B sequences of a micro-batch, T tokens of a sequence.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...configs import TrainConfig
from .checkpoint import Checkpoint, load_state, not_finite, state_of
from .data import Text, evaluation_batches, training_batch
from .engine import Engine
from .interrupt import Interrupt, stops_without_output
from .memory import peak_memory
from .metrics import Metrics, MetricsFile
from .optimizer import build_optimizer, learning_rate
from .progress import TrainingProgress
from .randomness import seed_generators
from .utilisation import Utilisation


@dataclass(frozen=True)
class Update:
    """The result of a step: mean loss in nats per byte, gradient norm before clipping, learning rate, tokens."""

    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int


@dataclass(frozen=True)
class Outcome:
    """The last finished step, and the signal that stopped the run, or None; SIGPIPE when the output was lost."""

    step: int
    signal_number: int | None


class Trainer:
    """A model with its optimizer and its text.

    Args:
        model: takes tokens and targets, int64 [B, T], and returns the mean loss; fused or not, split or not.
        text: to learn from.
        config: the section `train` of the config.
        sequence_length: T.
        device: where the model is.
        engine: that made the model what it is; None for one process.
    """

    def __init__(
        self,
        model: nn.Module,
        text: Text,
        *,
        config: TrainConfig,
        sequence_length: int,
        device: torch.device,
        engine: Engine | None = None,
    ) -> None:
        self.model = model
        self.engine = engine or Engine(model)
        self.text = text
        self.config = config
        self.sequence_length = sequence_length
        self.device = device
        self.optimizer = build_optimizer(
            model,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.beta1, config.beta2),
        )

    def step(self, step: int) -> Update:
        """One update of the weights; `step` is 1 for the first. Each process computes its rows of every batch.

        Raises:
            ValueError: the loss or the gradient is not finite; the weights do not change.
        """
        config = self.config
        rate = learning_rate(
            step,
            steps=config.steps,
            warmup_steps=config.warmup_steps,
            peak=config.learning_rate,
            minimum=config.min_learning_rate,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = self._gradients(step)
        total = self.engine.clip(config.clip_norm if config.clip_norm > 0 else math.inf)
        # One read of both, the only wait for a GPU in a step: it decides whether the weights change.
        own_loss, norm = torch.stack((loss.double(), total.double())).tolist()
        mean_loss = self.engine.processes.mean(own_loss)
        if not (math.isfinite(mean_loss) and math.isfinite(norm)):
            raise _diverged(step, f"the loss is {mean_loss} and the norm of its gradient {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = config.accumulate * config.batch_size * self.sequence_length
        return Update(loss=mean_loss, gradient_norm=norm, learning_rate=rate, tokens=tokens)

    def _gradients(self, step: int) -> Tensor:
        """Forward and backward of a step's micro-batches; the mean loss of this process."""
        config, engine = self.config, self.engine
        losses = []
        for micro_batch in range(config.accumulate):
            seed_generators(config.seed, step=step, micro_batch=micro_batch, dp_rank=engine.layout.data_rank)
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
        rows_BT = batch_BT[self.engine.layout.rows(len(batch_BT))]
        if self.device.type == "cuda":
            rows_BT = rows_BT.pin_memory()  # any other memory is copied while the host waits
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

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, without copies: of split ones this process's parts."""
        return state_of(self.model, self.optimizer)

    def restore(self, checkpoint: Checkpoint, *, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            ValueError: it is of another architecture, or holds what cannot be continued.
        """
        load_state(self.model, self.optimizer, checkpoint, path=path)


def train_steps(
    trainer: Trainer,
    *,
    done: int,
    metrics: MetricsFile | None,
    progress: TrainingProgress,
    save: Callable[[int], None],
    log: Callable[[Metrics], None],
    utilisation: Utilisation,
) -> Outcome:
    """Run the steps after `done`; write the curve and the checkpoints, one of them after the last step or a signal.

    Args:
        trainer: of the model.
        done: the step of the checkpoint; 0 for a new run.
        metrics: of the run; None in the processes that write no files.
        progress: of the run.
        save: writes the checkpoint of a step; every process calls it.
        log: takes every row, see `open_sinks`.
        utilisation: of the model.

    Raises:
        KeyboardInterrupt: a second signal came during a step.
        ValueError: the run diverged; the checkpoints are from before.
    """
    config, processes = trainer.config, trainer.engine.processes
    before = metrics.rows[-1].seconds if metrics is not None and metrics.rows else 0.0
    started = time.perf_counter()
    signals = Interrupt(once=not processes.launched)
    with signals as interrupt, stops_without_output(progress.console, interrupt), progress:
        for step in range(done + 1, config.steps + 1):
            step_started = time.perf_counter()
            update = trainer.step(step)
            speed = update.tokens / (time.perf_counter() - step_started)
            validation_loss = None
            if step == config.steps or step % config.evaluate_every == 0:
                validation_loss = trainer.validation_loss()
                if not math.isfinite(validation_loss):
                    raise _diverged(step, f"the validation loss is {validation_loss}")
            row = Metrics(
                step=step,
                loss=update.loss,
                validation_loss=validation_loss,
                learning_rate=update.learning_rate,
                gradient_norm=update.gradient_norm,
                tokens_per_second=speed,
                seconds=before + time.perf_counter() - started,
                model_flops_utilisation=utilisation.of(speed),
                peak_memory_bytes=peak_memory(trainer.device),
            )
            if metrics is not None:
                metrics.append(row)
            log(row)
            progress.step(row)
            # A signal reaches one process only, or each at another time; all stop after the same step.
            signal_number = processes.largest(interrupt.signal_number or 0) or None
            last = step == config.steps or signal_number is not None
            if last or step % config.checkpoint_every == 0:
                # A loss is of the weights before its update: the next step would tell too late.
                name = processes.first_of(not_finite(trainer.model))
                if name is not None:
                    raise _diverged(step, f"{name} holds a NaN or an infinity")
                if metrics is not None:
                    metrics.sync()
                save(step)
            if last:
                return Outcome(step, signal_number)
    return Outcome(done, None)


def _diverged(step: int, found: str) -> ValueError:
    return ValueError(
        f"training diverged at step {step}: {found}; a checkpoint, if there is one, is from before; try a lower "
        "train.learning_rate or a longer train.warmup_steps"
    )


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Make steps deterministic on the CPU; restore torch's settings afterwards.

    Otherwise compiled code sums the gradient of an embedding with several threads, in any order. On a GPU some of
    torch's kernels have no deterministic implementation, so nothing changes there.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory costs time, and we read none of it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def autocast(device: torch.device, *, precision: str) -> torch.autocast:
    """The autocast of a loss. Used by training and by the comparison after it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
