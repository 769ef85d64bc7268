"""`fuselayers bench suite`: measures all ops and whole models on one machine, and writes a folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from rich.console import Console

from ...errors import in_one_line
from ..text import chosen_names, say
from .cases import Settings, dtype_name
from .measure import COMPILE, Subject, measure
from .report import Report, write_folder
from .subjects import EAGER, ModelCall, model_subject, op_subject

_DTYPES: Final = ("bfloat16", "float16", "float32")
# The first shape is measured in every dtype. Eager dropout on a CPU takes 6 ns an element.
_SHAPES: Final = ((2, 4096, 4096), (4, 1024, 1024), (1, 2048, 12288))
_SHAPES_ON_A_CPU: Final = ((8, 256, 1024), (8, 256, 512), (2, 2048, 2048))
_QUICK: Final = ((8, 256, 512),)
# The most elements of x for an op with a matrix product on a CPU: a larger x takes seconds for each call.
_CPU_MATMUL: Final = 8 * 256 * 1024
_FUSED: Final = "inductor"
_DROPOUTS: Final = (0.1, 0.0)
_SIZE: Final = ("model.hidden_dim=128", "model.num_layers=3")
_TEXT: Final = (*_SIZE, "model.context_length=128")
MODELS: Final[Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]] = MappingProxyType(
    {
        "gpt_nano": ((8, 128), ()),
        "bert_tiny": ((8, 128), _TEXT),
        "llama_tiny": ((8, 128), _TEXT),
        "vit_tiny": ((8,), (*_SIZE, "model.image_size=32")),
    }
)
"""The models by name, with the shape of a batch, and overrides that give all of them the size of gpt_nano."""
_SIZE_ON_A_GPU: Final = ("model.hidden_dim=768", "model.num_layers=4", "attention.num_heads=12")
_TEXT_ON_A_GPU: Final = (*_SIZE_ON_A_GPU, "model.context_length=1024")
MODELS_ON_A_GPU: Final[Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]] = MappingProxyType(
    {
        "gpt_nano": ((8, 1024), _TEXT_ON_A_GPU),
        "llama_tiny": ((8, 1024), (*_TEXT_ON_A_GPU, "attention.num_kv_heads=4")),
        "bert_tiny": ((8, 1024), _TEXT_ON_A_GPU),
        "vit_tiny": ((64,), (*_SIZE_ON_A_GPU, "model.image_size=224", "model.patch_size=16")),
    }
)
"""The same models in a size that fills a GPU: the layers of GPT-2 small, but four of them, which compile sooner."""


_NORMS: Final = ("layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm")
_PRODUCTS: Final = ("attention", "linear", "linear_cross_entropy")
_VARIANTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    *(
        ("bias_activation_dropout", {"activation": activation, "bias": bias})
        for bias in (True, False)
        for activation in ("relu", "gelu", "squared_relu")
    ),
    *(("bias_dropout_residual", {"bias": bias}) for bias in (True, False)),
    *(
        (f"bias_dropout_residual_{norm}", {"style": style})
        for norm in ("layer_norm", "rms_norm")
        for style in ("post", "pre", "prenorm")
    ),
    ("dropout", {}),
    *(("gated_activation", {"activation": activation}) for activation in ("silu", "gelu_tanh")),
    *((op, {}) for op in (*_NORMS, "rotary", "cross_entropy", "linear", "linear_cross_entropy")),
    *(("attention", {"dropout": dropout}) for dropout in (0.0, 0.1)),
)
"""Every op of the suite with options of `Settings`, the most important first."""


@dataclass(frozen=True)
class Job:
    """A planned measurement.

    Attributes:
        is_model: whether it measures a model.
    """

    title: str
    make: Callable[[], Subject]
    is_model: bool = False


def run_suite(jobs: Sequence[Job], report: Report, *, folder: Path, device: torch.device, console: Console) -> int:
    """Measure, and write the folder after each measurement, so that a stopped run keeps its results.

    Returns:
        The exit code: 0, or 1 when a candidate of ours computes wrong numbers or raises an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, report)  # one that cannot be written is an error before the work starts
    say(console, report.machine)
    for job in jobs:
        say(console, job.title)
        try:
            subject = job.make()
            report.failed |= {f"{candidate}: {job.title}": reason for candidate, reason in subject.wrong.items()}
            rows = report.models if job.is_model else report.rows
            rows += measure(subject, repeats=report.repeats, device=device)
        except Exception as error:  # such as out of memory; the others are measured
            report.failed[job.title] = in_one_line(error)
        write_folder(folder, report)
    lines = [f"not timed: {name}: {reason}" for name, reason in report.failed.items()]
    say(console, *lines, *map(str, write_folder(folder, report)))
    return int(any(not name.startswith(COMPILE) for name in report.failed))


def jobs_of(ops: str | None, dtypes: str | None, *, quick: bool, device: torch.device) -> list[Job]:
    """Return the measurements, the most important first: of all ops in one shape, of models, of ops in others.

    Args:
        ops: comma-separated; None for all, and models.
        dtypes: comma-separated; None for all, and float32 on a CPU.
        quick: one small shape, no models.
    """
    names = chosen_names("op of bench suite", ops, dict.fromkeys(op for op, _ in _VARIANTS))
    on_cpu = device.type == "cpu"
    first, *others = (
        getattr(torch, name)
        for name in chosen_names("dtype of bench suite", dtypes or ("float32" if on_cpu else None), _DTYPES)
    )
    shape, *more = _QUICK if quick else _SHAPES_ON_A_CPU if on_cpu else _SHAPES

    def of_ops(shape: tuple[int, ...], dtype: torch.dtype) -> list[Job]:
        return [
            _op_job(op, options, Settings(shape, dtype, device, **options))
            for op, options in _VARIANTS
            if op in names and not (on_cpu and op in _PRODUCTS and torch.Size(shape).numel() > _CPU_MATMUL)
        ]

    models = [] if quick or ops is not None else _model_jobs(first, device)
    later = [job for dtype in others for job in of_ops(shape, dtype)]
    return [*of_ops(shape, first), *models, *later, *(job for other in more for job in of_ops(other, first))]


def _op_job(op: str, options: dict[str, Any], settings: Settings) -> Job:
    name = ", ".join([op, *(_label(option, value) for option, value in options.items())])
    title = f"{name}, {dtype_name(settings.dtype)}, {'x'.join(map(str, settings.shape))}"
    return Job(title, lambda: replace(op_subject(op, settings, backends=()), title=name))


def _label(option: str, value: Any) -> str:
    if option == "bias":
        return "bias" if value else "no bias"
    return f"dropout {value:g}" if option == "dropout" else str(value)


def _model_jobs(dtype: torch.dtype, device: torch.device) -> list[Job]:
    on_cpu = device.type == "cpu"
    backends = (_FUSED,) if on_cpu else (EAGER, _FUSED)

    def job(name: str, dropout: float) -> Job:
        shape, overrides = (MODELS if on_cpu else MODELS_ON_A_GPU)[name]
        title = f"{name}, dropout {dropout:g}"
        call = ModelCall(name, overrides, shape, dropout, dtype, device)
        return Job(title, lambda: replace(model_subject(call, backends=backends), title=title), is_model=True)

    return [job(name, dropout) for dropout in _DROPOUTS for name in MODELS]
