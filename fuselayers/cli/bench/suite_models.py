"""The suite's whole models: the training loss of a GPT, a BERT, a Llama and a ViT, forward and backward."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import torch

from ...partition import saved_bytes
from .cases import dtype_name
from .measure import EAGER, peak_bytes, results, time_interleaved
from .subjects import COMPILE, PLAIN, ModelCall, Subject, model_subject
from .suite import Measured, Suite, free_memory, one_line

_SIZE: Final = ("model.hidden_dim=128", "model.num_layers=3")
_TEXT: Final = (*_SIZE, "model.context_length=128")
MODELS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"gpt_nano": (), "bert_tiny": _TEXT, "llama_tiny": _TEXT, "vit_tiny": (*_SIZE, "model.image_size=32")}
)
"""The models by name, with overrides that give all of them the size of gpt_nano."""
_SIZE_ON_A_GPU: Final = ("model.hidden_dim=768", "model.num_layers=4", "attention.num_heads=12")
_TEXT_ON_A_GPU: Final = (*_SIZE_ON_A_GPU, "model.context_length=1024")
MODELS_ON_A_GPU: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gpt_nano": _TEXT_ON_A_GPU,
        "llama_tiny": (*_TEXT_ON_A_GPU, "attention.num_kv_heads=4"),
        "bert_tiny": _TEXT_ON_A_GPU,
        "vit_tiny": (*_SIZE_ON_A_GPU, "model.image_size=224", "model.patch_size=16"),
    }
)
"""The same models in a size that fills a GPU: the layers of GPT-2 small, but four of them, which compile sooner."""
_BATCH: Final = 8
_TOKENS: Final = 128
_TOKENS_ON_A_GPU: Final = 1024
_IMAGES_ON_A_GPU: Final = 64
DROPOUTS: Final = (0.1, 0.0)
FUSED: Final = "inductor"
OWN_MODELS: Final = (FUSED, f"{PLAIN}, {FUSED}")
"""The candidates that this library makes."""


def models_on(device: torch.device) -> Mapping[str, tuple[str, ...]]:
    """The models to measure on a device."""
    return MODELS_ON_A_GPU if device.type == "cuda" else MODELS


def model_calls_ahead(chosen: Sequence[str], dtype: torch.dtype, device: torch.device) -> list[Callable[[], bool]]:
    """Calls for `compile_ahead`, which make everything that `measure_models` will call."""
    return [partial(_run_once, name, dropout, dtype, device) for dropout in DROPOUTS for name in chosen]


def measure_models(
    chosen: Sequence[str],
    suite: Suite,
    *,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    deadline: float,
    say: Callable[[str], None],
    keep: Callable[[Suite], None] = lambda suite: None,
) -> None:
    """Add the chosen models to `suite.models`; those with no time left before `deadline` to `suite.left_out`.

    Args:
        chosen: names of MODELS.
        suite: what has been measured.
        dtype: of weights and images.
        device: of the models.
        repeats: how often each candidate is timed.
        deadline: of `time.monotonic`; no model begins later.
        say: gets the title of each model.
        keep: gets all measurements so far, after each model.
    """
    for dropout in DROPOUTS:
        for name in chosen:
            title = f"{name}, dropout {dropout:g}"
            if time.monotonic() > deadline:
                suite.left_out.append(title)
                continue
            say(title)
            try:
                subject = _subject(name, dropout, dtype, device)
                suite.failed |= {f"{candidate}: {title}": reason for candidate, reason in subject.wrong.items()}
                shape = _shape(name, device)
                suite.models += _rows(subject, title, shape, dtype_name(dtype), repeats=repeats, device=device)
            except Exception as error:
                suite.failed[f"{FUSED}: {title}"] = one_line(error)
            keep(suite)


def _subject(name: str, dropout: float, dtype: torch.dtype, device: torch.device) -> Subject:
    torch.compiler.reset()
    # In eager mode the library's kernels run on a GPU alone.
    backends = (EAGER, FUSED, COMPILE) if device.type == "cuda" else (FUSED, COMPILE)
    shape, overrides = _shape(name, device), models_on(device)[name]
    return model_subject(ModelCall(name, overrides, shape, dropout, dtype, device), backends=backends)


def _shape(name: str, device: torch.device) -> tuple[int, ...]:
    on_a_gpu = device.type == "cuda"
    if name.startswith("vit"):
        return (_IMAGES_ON_A_GPU if on_a_gpu else _BATCH,)
    return _BATCH, _TOKENS_ON_A_GPU if on_a_gpu else _TOKENS


def _run_once(name: str, dropout: float, dtype: torch.dtype, device: torch.device) -> bool:
    for candidate in _subject(name, dropout, dtype, device).candidates:
        results(candidate)
    free_memory(device)
    return True


def _rows(
    subject: Subject, title: str, shape: tuple[int, ...], dtype: str, *, repeats: int, device: torch.device
) -> Iterator[Measured]:
    timings = time_interleaved(subject.candidates, repeats=repeats, device=device)
    for candidate, timing in zip(subject.candidates, timings, strict=True):
        yield Measured(
            title=title,
            shape=shape,
            dtype=dtype,
            candidate=candidate.name,
            seconds={"forward": timing.forward, "forward_backward": timing.both},
            peak=peak_bytes(candidate, device=device),
            kept=saved_bytes(candidate.call, parameters=candidate.leaves),
            floor={},
        )


def models_table(rows: Sequence[Measured]) -> list[str]:
    """The results as lines of Markdown: the times of plain PyTorch, and the ratios of the others."""
    names = [name for name in dict.fromkeys(row.candidate for row in rows) if name != PLAIN]
    headings = ["model", "examples x tokens", f"{PLAIN} f", f"{PLAIN} fb"]
    headings += [f"{name} {short}" for name in names for short in ("f", "fb")]
    headings += [f"{name} kept" for name in (PLAIN, *names)]
    lines = [
        "## Whole models",
        "",
        f"Training losses. {PLAIN}: the model written in PyTorch alone, in eager mode, in milliseconds; {COMPILE} and "
        f'"{PLAIN}, {FUSED}" compile that one, the latter through `fuse`; {FUSED}: this library\'s model through '
        f"`fuse`; {EAGER}, on a GPU: that model with its own kernels. Ratios as above. Kept: megabytes saved for "
        "backward, without the weights.",
        "",
        f"| {' | '.join(headings)} |",
        "| --- | --- |" + " ---: |" * (len(headings) - 2),
    ]
    for title in dict.fromkeys(row.title for row in rows):
        of_model = {row.candidate: row for row in rows if row.title == title}
        plain = of_model[PLAIN]
        cells = [title, " x ".join(map(str, plain.shape))]
        cells += [f"{plain.median(span) * 1e3:.2f}" for span in plain.seconds]
        cells += [
            f"{plain.median(span) / of_model[name].median(span):.2f}" if name in of_model else ""
            for name in names
            for span in plain.seconds
        ]
        cells += [f"{of_model[name].kept / 1e6:.2f}" if name in of_model else "" for name in (PLAIN, *names)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
