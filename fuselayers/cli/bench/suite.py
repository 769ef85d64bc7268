"""Measures all ops on one machine, in many shapes, dtypes and options. suite_models.py measures whole models."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from ...partition import saved_bytes
from .cases import OpCase, Outputs, Settings, dtype_name, op_case
from .measure import EAGER, OURS, Candidate, copy_bandwidth, peak_bytes, results, time_interleaved
from .peers import LIGER, liger_function
from .subjects import COMPILE, Implementation, op_candidate, op_fault

# The largest first.
SHAPES: Final = (
    (2, 4096, 4096),
    (1, 2048, 12288),
    (2, 2048, 2048),
    (4, 1024, 1024),
    (8, 512, 1024),
    (8, 256, 512),
)
_CHECKED_ROWS: Final = (2, 150)
# Wider, the weights of an op with a matmul would take gigabytes in float64.
_CHECKED_MATMUL: Final = 1024
# Elements of x for such an op on a CPU: a larger one takes seconds for each call.
_CPU_MATMUL: Final = 8 * 256 * 512
_DROPOUT: Final = 0.1


@dataclass(frozen=True)
class Variant:
    """One op with options of `Settings`, and a label for them."""

    op: str
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.op}, {self.label}" if self.label else self.op


@dataclass(frozen=True)
class Round:
    """All variants once, in one dtype and in shapes of x; `any_size`: `torch.compile` compiles with dynamic sizes."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    any_size: bool


@dataclass(frozen=True)
class Measured:
    """The measurements of one candidate for one variant, shape and dtype.

    Args:
        title: of the variant.
        shape: of x.
        dtype: as "float32".
        candidate: its name.
        seconds: every repeat, of "forward" and of "forward_backward".
        peak: peak bytes of forward and backward, without the inputs; None on a CPU.
        kept: bytes saved for backward, without the inputs.
        floor: bytes that "forward" and "forward_backward" must move; empty for ops that bandwidth does not limit.
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
        """Median seconds of one of the two spans."""
        return statistics.median(self.seconds[span])


@dataclass
class Suite:
    """All measurements.

    Args:
        bandwidth: of a copy, in bytes per second, read and written.
        rows: the times of ops.
        models: the times of whole models.
        failed: wrong numbers or errors, by candidate.
        left_out: variants for which there was no time.
    """

    bandwidth: float
    rows: list[Measured] = field(default_factory=list)
    models: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def variants() -> list[Variant]:
    """Return every op of the suite with its options, the most important first."""
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
        *(Variant(op) for op in ("cross_entropy", "linear_cross_entropy")),
    ]


def measure_suite(
    chosen: Sequence[Variant],
    *,
    rounds: Sequence[Round],
    device: torch.device,
    repeats: int,
    deadline: float,
    say: Callable[[str], None],
    keep: Callable[[Suite], None] = lambda suite: None,
) -> Suite:
    """Check and time every op in every width and dtype, one after the other.

    No measurement begins after `deadline`, in seconds of `time.monotonic`; `left_out` names the rest. `say` gets the
    name of each measurement, `keep` all measurements so far, after each variant.
    """
    suite = Suite(copy_bandwidth(device))
    for variant, one in _in_order(chosen, rounds, device):
        shapes = _affordable(variant, one.shapes, device)
        name = f"{variant.title}, {dtype_name(one.dtype)}"
        if time.monotonic() > deadline:
            suite.left_out += [f"{name}, {'x'.join(map(str, shape))}" for shape in shapes]
            continue
        say(name)
        implementations = _right_implementations(variant, one, device, suite)
        for shape in shapes:
            if time.monotonic() > deadline:
                suite.left_out.append(f"{name}, {'x'.join(map(str, shape))}")
            else:
                _measure(variant, settings_of(variant, shape, one.dtype, device), implementations, suite, repeats)
        keep(suite)
    return suite


def calls_ahead(chosen: Sequence[Variant], rounds: Sequence[Round], device: torch.device) -> list[Callable[[], bool]]:
    """Calls for `compile_ahead`, which make everything that `measure_suite` will call."""
    return [partial(_run_once, variant, one, device) for variant, one in _in_order(chosen, rounds, device)]


def _in_order(chosen: Sequence[Variant], rounds: Sequence[Round], device: torch.device) -> list[tuple[Variant, Round]]:
    return [(variant, one) for one in rounds for variant in chosen if _affordable(variant, one.shapes, device)]


def _run_once(variant: Variant, one: Round, device: torch.device) -> bool:
    """Call all that the suite checks and times of a variant, and so compile it."""
    suite = Suite(bandwidth=1.0)
    implementations = _right_implementations(variant, one, device, suite)
    for shape in _affordable(variant, one.shapes, device):
        _candidates(variant, settings_of(variant, shape, one.dtype, device), implementations, suite)
    free_memory(device)
    return True


def free_memory(device: torch.device) -> None:
    """Free what a worker's last call used; the other processes need the memory of the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _right_implementations(
    variant: Variant, one: Round, device: torch.device, suite: Suite
) -> dict[str, Implementation]:
    """The implementations with right numbers in every width of a round; the others are added to `suite.failed`."""
    implementations = _implementations(variant, one, device)
    others = {key: implementations[key] for key in implementations.keys() - {EAGER}}
    right = {EAGER, *_check(variant, others, one.shapes, one.dtype, device, suite)}
    # The code compiled for the checks is not the code that a user with these shapes would get.
    return {key: made for key, made in _implementations(variant, one, device).items() if key in right}


def settings_of(variant: Variant, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Settings:
    """The settings of a variant's call."""
    options = {"dropout": 0.0, "activation": "gelu", **variant.options}
    return Settings(shape=shape, **options, dtype=dtype, device=device)


def _affordable(variant: Variant, shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[tuple[int, ...]]:
    if device.type != "cpu" or "linear" not in variant.op:
        return list(shapes)
    return [shape for shape in shapes if torch.Size(shape).numel() <= _CPU_MATMUL]


def _implementations(variant: Variant, one: Round, device: torch.device) -> dict[str, Implementation]:
    """The implementation of each candidate."""
    # Dynamo compiles a function for at most eight kinds of call, and then silently runs it in eager mode.
    torch.compiler.reset()
    small = op_case(variant.op, settings_of(variant, (*_CHECKED_ROWS, 64), one.dtype, device))
    compiled = torch.compile(small.plain, dynamic=True if one.any_size else None, fullgraph=True)
    implementations: dict[str, Implementation] = {
        EAGER: lambda case: case.plain,
        COMPILE: lambda case: compiled,
        OURS: lambda case: case.op,
    }
    liger = liger_function(variant.op, small.options) if device.type == "cuda" else None
    if liger is not None:
        implementations[LIGER] = lambda case: liger
    return implementations


def _candidate(name: str, case: OpCase, function: Callable[..., Outputs]) -> Candidate:
    if name != LIGER:
        return op_candidate(name, case, function)
    # Some of Liger's backwards, and the forward of its cross entropy, overwrite their inputs.
    own = {key: one.detach().clone().requires_grad_(one.requires_grad) for key, one in case.tensors.items()}

    def restore() -> None:
        for key, one in own.items():
            one.detach().copy_(case.tensors[key].detach())

    options = {key: value for key, value in case.options.items() if key == "activation"}
    return replace(op_candidate(name, replace(case, tensors=own, options=options), function), restore=restore)


def _check(
    variant: Variant,
    implementations: Mapping[str, Implementation],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    suite: Suite,
) -> set[str]:
    """Return the names of the implementations that are right in every width; add the others to `suite.failed`."""
    right = set(implementations)
    widths = sorted({shape[-1] for shape in _affordable(variant, shapes, device)})
    if "linear" in variant.op:
        widths = [min(width, _CHECKED_MATMUL) for width in widths[:1]]
    for width in widths:
        settings = settings_of(variant, (*_CHECKED_ROWS, width), dtype, device)
        for name in sorted(right):
            try:
                reason = op_fault(
                    name, implementations[name], settings, variant.op, candidate=_candidate, same_masks=name == OURS
                )
            except Exception as error:
                reason = one_line(error)
            if reason is not None:
                right.remove(name)
                suite.failed[f"{name}: {variant.title}, {dtype_name(dtype)}, width {width}"] = reason
    return right


def _candidates(
    variant: Variant, settings: Settings, implementations: Mapping[str, Implementation], suite: Suite
) -> tuple[OpCase, list[Candidate]]:
    """Return the case, and the candidates that run; the errors of the others are added to `suite.failed`."""
    case, candidates = op_case(variant.op, settings), []
    for name, implementation in implementations.items():
        candidate = _candidate(name, case, implementation(case))
        try:
            results(candidate)
        except Exception as error:
            shape = "x".join(map(str, settings.shape))
            suite.failed[f"{name}: {variant.title}, {dtype_name(settings.dtype)}, {shape}"] = one_line(error)
        else:
            candidates.append(candidate)
    return case, candidates


def _measure(
    variant: Variant, settings: Settings, implementations: Mapping[str, Implementation], suite: Suite, repeats: int
) -> None:
    case, candidates = _candidates(variant, settings, implementations, suite)
    dtype = dtype_name(settings.dtype)
    timings = time_interleaved(candidates, repeats=repeats, device=settings.device)
    floor = {}
    if case.floor is not None:
        size, (forward, backward) = next(iter(case.tensors.values())).nbytes, case.floor
        floor = {"forward": int(forward * size), "forward_backward": int((forward + backward) * size)}
    for candidate, timing in zip(candidates, timings, strict=True):
        suite.rows.append(
            Measured(
                title=variant.title,
                shape=settings.shape,
                dtype=dtype,
                candidate=candidate.name,
                seconds={"forward": timing.forward, "forward_backward": timing.both},
                peak=peak_bytes(candidate, device=settings.device),
                kept=saved_bytes(candidate.call, parameters=[*case.tensors.values(), *candidate.leaves]),
                floor=floor,
            )
        )


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of its text. Used by the suite's models too."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
