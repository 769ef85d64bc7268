"""The whole measurement of the ops on one machine: every op, shape, dtype and option, into one folder."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ...ops import patience
from ...partition import saved_bytes
from .cases import OpCase, Outputs, Settings, double, dtype_name, op_case
from .measure import Candidate, Timing, copy_bandwidth, disagreement, peak_bytes, results, time_interleaved
from .peers import LIGER, liger_form

__all__ = ["EAGER", "OURS", "SHAPES", "Measured", "Suite", "Variant", "measure_suite", "variants"]

EAGER: Final = "eager"
COMPILE: Final = "torch.compile"
OURS: Final = "fuselayers"

# Those of the measurements that the project grew out of, the largest first: that one torch.compile compiles for itself,
# the others with sizes left open, as it does for a user whose shapes change.
SHAPES: Final = (
    (2, 4096, 4096),
    (1, 2048, 12288),
    (2, 2048, 2048),
    (4, 1024, 1024),
    (8, 512, 1024),
    (8, 256, 512),
)
# Of x for an op with a matmul on a CPU: a larger one takes seconds for each call, whoever computes it.
_CPU_MATMUL: Final = 8 * 256 * 512
_CHECKED: Final = (2, 7, 192)
_DROPOUT: Final = 0.1


@dataclass(frozen=True)
class Variant:
    """One op with one set of options.

    Args:
        op: its name.
        label: what is said of its options.
        options: of `Settings`.
    """

    op: str
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.op}, {self.label}" if self.label else self.op


@dataclass(frozen=True)
class Measured:
    """What one candidate did with one variant, shape and dtype.

    Args:
        title: of the variant.
        shape: of x.
        dtype: by torch's name, without "torch.".
        candidate: whose form it is.
        seconds: every repeat, of "forward" and of "forward_backward".
        peak: bytes that forward and backward took at most, beside the inputs; None on a CPU.
        kept: bytes kept for backward, beside the inputs.
        floor: bytes that "forward" and "forward_backward" must move; none where that is not what limits the op.
    """

    title: str
    shape: tuple[int, ...]
    dtype: str
    candidate: str
    seconds: dict[str, list[float]]
    peak: int | None
    kept: int
    floor: dict[str, int]

    def median(self, span: str) -> float:
        """Seconds of one of the two spans."""
        return statistics.median(self.seconds[span])


@dataclass
class Suite:
    """All that was measured.

    Args:
        bandwidth: of copying, in bytes per second, read and written.
        rows: in the order of measuring.
        wrong: which candidates compute wrong numbers, and how; they are not timed.
        left_out: what there was no time for.
    """

    bandwidth: float
    rows: list[Measured] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def variants() -> list[Variant]:
    """Return every op of the suite with its options, the most telling first."""
    return [
        *(
            Variant(
                "bias_activation_dropout",
                f"{activation}, {'bias' if bias else 'no bias'}",
                {"activation": activation, "bias": bias, "dropout": _DROPOUT},
            )
            for bias in (True, False)
            for activation in ("relu", "gelu", "squared_relu")
        ),
        *(
            Variant("bias_dropout_residual", "bias" if bias else "no bias", {"bias": bias, "dropout": _DROPOUT})
            for bias in (True, False)
        ),
        *(
            Variant(f"bias_dropout_residual_{norm}", style, {"style": style, "dropout": _DROPOUT})
            for norm in ("layer_norm", "rms_norm")
            for style in ("post", "pre", "prenorm")
        ),
        Variant("dropout", "", {"dropout": _DROPOUT}),
        *(Variant("gated_activation", activation, {"activation": activation}) for activation in ("silu", "gelu_tanh")),
        *(Variant(op) for op in ("layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm", "rotary")),
        *(Variant(op) for op in ("softmax", "cross_entropy", "linear_cross_entropy")),
        *(Variant("linear_activation", activation, {"activation": activation}) for activation in ("gelu", "relu")),
    ]


def measure_suite(
    chosen: Sequence[Variant],
    *,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    repeats: int,
    minutes: float,
    say: Callable[[str], None],
) -> Suite:
    """Check and time.

    Args:
        chosen: what to measure.
        shapes: of x.
        dtypes: each for all variants, before the next one begins.
        device: where.
        repeats: how often each candidate is timed.
        minutes: no new measurement begins after these; what is left out is named.
        say: is told what is being measured.
    """
    deadline = time.monotonic() + 60 * minutes
    suite = Suite(copy_bandwidth(device))
    for dtype in dtypes:
        for variant in chosen:
            name = f"{variant.title}, {dtype_name(dtype)}"
            if time.monotonic() > deadline:
                suite.left_out.append(name)
                continue
            say(name)
            settings = Settings(
                shape=_CHECKED, **{"dropout": 0.0, "activation": "gelu", **variant.options}, dtype=dtype, device=device
            )
            forms = dict(_forms(variant.op, settings))
            # On a CPU an op chooses its form by measuring; here it shall have done so before it is timed.
            with patience(0):
                right = _check(variant, settings, forms, suite)
                for shape in shapes:
                    if device.type == "cpu" and "linear" in variant.op and torch.Size(shape).numel() > _CPU_MATMUL:
                        continue
                    if time.monotonic() > deadline:
                        suite.left_out.append(f"{name}, {'x'.join(map(str, shape))}")
                        continue
                    rows = _measure(variant, replace(settings, shape=shape), right, device=device, repeats=repeats)
                    suite.rows.extend(rows)
    return suite


def _forms(op: str, settings: Settings) -> Iterator[tuple[str, Callable[[OpCase], Callable[..., Outputs]]]]:
    """Each candidate's name, and which function of a case it calls."""
    compiled = torch.compile(op_case(op, settings).plain)
    yield EAGER, lambda case: case.plain
    yield COMPILE, lambda case: compiled
    yield OURS, lambda case: case.op
    if settings.device.type == "cuda":
        form = liger_form(op, op_case(op, settings).options)
        if form is not None:
            yield LIGER, lambda case: form


def _candidate(name: str, case: OpCase, function: Callable[..., Outputs]) -> Candidate:
    tensors = case.tensors
    if name == LIGER:
        # Some of its backwards write over what forward was given.
        tensors = {key: one.detach().clone().requires_grad_(one.requires_grad) for key, one in tensors.items()}
    arguments: dict[str, Any] = tensors | (case.options if name != LIGER or "activation" in case.options else {})

    def call() -> tuple[Tensor, ...]:
        outputs = function(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return Candidate(name, call, tuple(one for one in tensors.values() if one.requires_grad))


def _check(
    variant: Variant,
    settings: Settings,
    forms: dict[str, Callable[[OpCase], Callable[..., Outputs]]],
    suite: Suite,
) -> dict[str, Callable[[OpCase], Callable[..., Outputs]]]:
    """The candidates whose numbers are right; the others are written down.

    Each draws masks of its own, so they are compared without dropout. With it, ours is held against its formula.
    """
    still = op_case(variant.op, replace(settings, dropout=0.0))
    plain, truth = _candidate(EAGER, still, still.plain), _candidate("float64", double(still), still.plain)
    plainly, exactly = results(plain), results(truth)
    right = {}
    for name, form in forms.items():
        reason = disagreement(results(_candidate(name, still, form(still))), eager=plainly, truth=exactly)
        if reason is None and name == OURS and settings.dropout:
            case = op_case(variant.op, settings)
            formula = partial(case.op, backend=EAGER)
            reason = disagreement(
                results(_candidate(name, case, form(case))),
                eager=results(_candidate(EAGER, case, formula)),
                truth=results(_candidate("float64", double(case), formula)),
            )
        if reason is None:
            right[name] = form
        else:
            suite.wrong[f"{name}: {variant.title}, {dtype_name(settings.dtype)}"] = reason
    return right


def _measure(
    variant: Variant,
    settings: Settings,
    forms: dict[str, Callable[[OpCase], Callable[..., Outputs]]],
    *,
    device: torch.device,
    repeats: int,
) -> Iterator[Measured]:
    case = op_case(variant.op, settings)
    candidates = [_candidate(name, case, form(case)) for name, form in forms.items()]
    timings = time_interleaved(candidates, repeats=repeats, device=device)
    inputs = list(case.tensors.values())
    floor = _floor(case, candidates[0])
    for candidate, timing in zip(candidates, timings, strict=True):
        yield Measured(
            title=variant.title,
            shape=settings.shape,
            dtype=dtype_name(settings.dtype),
            candidate=candidate.name,
            seconds=_seconds(timing),
            peak=peak_bytes(candidate, device=device),
            kept=saved_bytes(candidate.call, parameters=inputs),
            floor=floor,
        )


def _seconds(timing: Timing) -> dict[str, list[float]]:
    return {"forward": timing.forward, "forward_backward": timing.both}


def _floor(case: OpCase, candidate: Candidate) -> dict[str, int]:
    """What must go to and from memory: forward reads its inputs and writes its outputs, backward the other way round.

    Backward also reads again what the op says it keeps.
    """
    if case.kept is None:
        return {}
    inputs = sum(one.nbytes for one in case.tensors.values())
    outputs = sum(one.nbytes for one in candidate.call())
    gradients = sum(one.nbytes for one in case.tensors.values() if one.requires_grad)
    forward = inputs + outputs
    x = next(iter(case.tensors.values()))
    return {"forward": forward, "forward_backward": forward + outputs + gradients + int(case.kept * x.nbytes)}
