"""The whole measurement of the ops on one machine: every op, shape, dtype and option, into one folder."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from ...ops.forms.launch import why_no_kernels
from ...partition import saved_bytes, warm_up
from .calls import CallCost, call_cost
from .cases import OpCase, Outputs, Settings, double, dtype_name, op_case
from .measure import EAGER, OURS, Candidate, copy_bandwidth, disagreement, peak_bytes, results, time_interleaved
from .peers import LIGER, liger_form
from .subjects import COMPILE, op_candidate

__all__ = ["SHAPES", "Measured", "Round", "Suite", "Variant", "measure_suite", "variants"]


# Those of the measurements that the project grew out of, the largest first.
SHAPES: Final = (
    (2, 4096, 4096),
    (1, 2048, 12288),
    (2, 2048, 2048),
    (4, 1024, 1024),
    (8, 512, 1024),
    (8, 256, 512),
)
# What a GPU has done before a CPU has asked for the next.
_CALLED: Final = (2, 32, 64)
_CHECKED_ROWS: Final = (2, 150)
# Wider, the weights of an op with a matmul would take gigabytes in float64.
_CHECKED_MATMUL: Final = 1024
# Of x for such an op on a CPU: a larger one takes seconds for each call, whoever computes it.
_CPU_MATMUL: Final = 8 * 256 * 512
_DROPOUT: Final = 0.1

Form = Callable[[OpCase], Callable[..., Outputs]]
Progress = Callable[["Suite"], None]


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
class Round:
    """All variants once, in one dtype.

    Args:
        dtype: of the tensors.
        shapes: of x.
        any_size: whether `torch.compile` makes one code for all shapes, as it does for a user whose shapes change, or
            one for each.
    """

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    any_size: bool


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
        calls: what the ops' calls cost the CPU; none where they launch no kernels.
        rows: in the order of measuring.
        failed: which candidates were not timed, and why: wrong numbers, or an error.
        left_out: what there was no time for.
    """

    bandwidth: float
    calls: list[CallCost] = field(default_factory=list)
    rows: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
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
    rounds: Sequence[Round],
    device: torch.device,
    repeats: int,
    minutes: float,
    say: Callable[[str], None],
    keep: Progress = lambda suite: None,
) -> Suite:
    """Check and time.

    Args:
        chosen: what to measure.
        rounds: in which dtypes and shapes, one round after the other.
        device: where.
        repeats: how often each candidate is timed.
        minutes: no new measurement begins after these; what is left out is named.
        say: is told what is being measured.
        keep: is given what there is so far, after each variant.
    """
    deadline = time.monotonic() + 60 * minutes
    suite = Suite(copy_bandwidth(device))
    # "auto" measures at the first call, before anything is timed.
    with warm_up(0):
        if why_no_kernels(device) is None:
            say("what calls cost")
            suite.calls += _call_costs(chosen, dtype=rounds[0].dtype, device=device, readings=repeats)
        say("the ops' numbers")
        checked = _check_all(chosen, rounds, device, suite)
        for one in rounds:
            for variant in chosen:
                settings = _settings(variant, one.shapes[0], one.dtype, device)
                name = f"{variant.title}, {dtype_name(one.dtype)}"
                shapes = [shape for shape in one.shapes if _is_affordable(variant, shape, device)]
                if not shapes:
                    continue
                if time.monotonic() > deadline:
                    suite.left_out += [f"{name}, {'x'.join(map(str, shape))}" for shape in shapes]
                    continue
                say(name)
                forms = dict(_forms(variant.op, settings, any_size=one.any_size))
                right = checked[variant.title, one.dtype]
                if COMPILE not in right:
                    widths = sorted({shape[-1] for shape in shapes})
                    others = {key: form for key, form in forms.items() if key != OURS}
                    right |= _check(variant, settings, others, widths, suite)
                    # What was compiled for the checks is not what a user with these shapes would get.
                    forms = dict(_forms(variant.op, settings, any_size=one.any_size))
                forms = {key: form for key, form in forms.items() if key in right}
                for shape in shapes:
                    if time.monotonic() > deadline:
                        suite.left_out.append(f"{name}, {'x'.join(map(str, shape))}")
                        continue
                    _measure(variant, replace(settings, shape=shape), forms, suite, repeats=repeats)
                keep(suite)
    return suite


def _settings(variant: Variant, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Settings:
    options = {"dropout": 0.0, "activation": "gelu", **variant.options}
    return Settings(shape=shape, **options, dtype=dtype, device=device)


def _check_all(
    chosen: Sequence[Variant], rounds: Sequence[Round], device: torch.device, suite: Suite
) -> dict[tuple[str, torch.dtype], set[str]]:
    """Check ours before anything is timed, however little time there is: which candidates are right, so far."""
    forms: dict[str, Form] = {EAGER: lambda case: case.plain, OURS: lambda case: case.op}
    checked: dict[tuple[str, torch.dtype], set[str]] = {}
    for dtype in dict.fromkeys(one.dtype for one in rounds):
        for variant in chosen:
            shapes = [shape for one in rounds if one.dtype == dtype for shape in one.shapes]
            widths = sorted({shape[-1] for shape in shapes if _is_affordable(variant, shape, device)})
            if widths:
                settings = _settings(variant, shapes[0], dtype, device)
                checked[variant.title, dtype] = _check(variant, settings, forms, widths, suite)
    return checked


def _call_costs(
    chosen: Sequence[Variant], *, dtype: torch.dtype, device: torch.device, readings: int
) -> Iterator[CallCost]:
    for variant in chosen:
        case = op_case(variant.op, _settings(variant, _CALLED, dtype, device))
        if case.floor is not None:  # else most of its work is torch's
            yield call_cost(variant.title, case, readings=readings, device=device)


def _is_affordable(variant: Variant, shape: tuple[int, ...], device: torch.device) -> bool:
    return device.type != "cpu" or "linear" not in variant.op or torch.Size(shape).numel() <= _CPU_MATMUL


def _forms(op: str, settings: Settings, *, any_size: bool) -> Iterator[tuple[str, Form]]:
    """Each candidate's name, and which function of a case it calls."""
    # One function's code is compiled for eight kinds of call at most; then torch.compile is eager without a word.
    torch.compiler.reset()
    small = op_case(op, replace(settings, shape=(*_CHECKED_ROWS, 64)))
    compiled = torch.compile(small.plain, dynamic=True if any_size else None, fullgraph=True)
    yield EAGER, lambda case: case.plain
    yield COMPILE, lambda case: compiled
    yield OURS, lambda case: case.op
    if settings.device.type == "cuda":
        form = liger_form(op, small.options)
        if form is not None:
            yield LIGER, lambda case: form


def _candidate(name: str, case: OpCase, function: Callable[..., Outputs]) -> Candidate:
    if name != LIGER:
        return op_candidate(name, case, function)
    # Some of its backwards, and the forward of its cross entropy, write over what forward was given.
    own = {key: one.detach().clone().requires_grad_(one.requires_grad) for key, one in case.tensors.items()}

    def restore() -> None:
        for key, one in own.items():
            one.detach().copy_(case.tensors[key].detach())

    options = {key: value for key, value in case.options.items() if key == "activation"}
    return replace(op_candidate(name, replace(case, tensors=own, options=options), function), restore=restore)


def _check(
    variant: Variant, settings: Settings, forms: dict[str, Form], widths: Sequence[int], suite: Suite
) -> set[str]:
    """The candidates whose numbers are right in every width; the others are written down.

    Each draws masks of its own, so they are compared without dropout. With it, ours is held against its formula.
    """
    right = set(forms)
    if "linear" in variant.op:
        widths = [min(*widths, _CHECKED_MATMUL)] if len(widths) > 1 else [min(widths[0], _CHECKED_MATMUL)]
    for width in widths:
        here = replace(settings, shape=(*_CHECKED_ROWS, width))
        still = op_case(variant.op, replace(here, dropout=0.0))
        plainly = results(_candidate(EAGER, still, still.plain))
        exactly = results(_candidate("float64", double(still), still.plain))
        for name in sorted(right):
            try:
                reason = disagreement(
                    results(_candidate(name, still, forms[name](still))), eager=plainly, truth=exactly
                )
                if reason is None and name == OURS and settings.dropout:
                    case = op_case(variant.op, here)
                    formula = partial(case.op, backend=EAGER)
                    reason = disagreement(
                        results(_candidate(name, case, forms[name](case))),
                        eager=results(_candidate(EAGER, case, formula)),
                        truth=results(_candidate("float64", double(case), formula)),
                    )
            except Exception as error:
                reason = _one_line(error)
            if reason is not None:
                right.remove(name)
                place = f"{variant.title}, {dtype_name(settings.dtype)}, width {width}"
                suite.failed[f"{name}: {place}"] = reason
    return right


def _measure(variant: Variant, settings: Settings, forms: dict[str, Form], suite: Suite, *, repeats: int) -> None:
    case = op_case(variant.op, settings)
    candidates = []
    for name, form in forms.items():
        candidate = _candidate(name, case, form(case))
        try:
            results(candidate)
        except Exception as error:
            shape = "x".join(map(str, settings.shape))
            suite.failed[f"{name}: {variant.title}, {dtype_name(settings.dtype)}, {shape}"] = _one_line(error)
        else:
            candidates.append(candidate)
    timings = time_interleaved(candidates, repeats=repeats, device=settings.device)
    size = next(iter(case.tensors.values())).nbytes
    forward, backward = case.floor or (0.0, 0.0)
    floor = {"forward": int(forward * size), "forward_backward": int((forward + backward) * size)}
    for candidate, timing in zip(candidates, timings, strict=True):
        suite.rows.append(
            Measured(
                title=variant.title,
                shape=settings.shape,
                dtype=dtype_name(settings.dtype),
                candidate=candidate.name,
                seconds={"forward": timing.forward, "forward_backward": timing.both},
                peak=peak_bytes(candidate, device=settings.device),
                kept=saved_bytes(candidate.call, parameters=[*case.tensors.values(), *candidate.leaves]),
                floor=floor if case.floor is not None else {},
            )
        )


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
