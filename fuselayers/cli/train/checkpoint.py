"""A run's checkpoint: the whole state of training.

A run keeps its last two. Every record of a checkpoint (it is a zip file) has a checksum, which is compared on reading.
"""

import math
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ..files import write_whole
from .engine import like, local

FILE_NAME = "checkpoint.pt"
PREVIOUS_NAME = "checkpoint.previous.pt"
_FORMAT = "fuselayers.checkpoint"
_VERSION = 2


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Args:
        step: the number of finished steps.
        config_yaml: the run's resolved config, as `fuselayers.configs.to_yaml` writes it.
        text_fingerprint: `Text.fingerprint` of the text.
        curve: the content of metrics.csv up to `step`.
        model: the model's state_dict.
        optimizer: the optimizer's state_dict.
        random_state: torch's generators: "cpu", and one "cuda:<index>" per GPU.
    """

    step: int
    config_yaml: str
    text_fingerprint: str
    curve: str
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    random_state: dict[str, Tensor]


def write_checkpoint(path: Path, checkpoint: Checkpoint, *, keeps_previous: bool = True) -> None:
    """Write a checkpoint, and keep the one before it as `checkpoint.previous.pt` in the same folder.

    Without `keeps_previous` it replaces the newest one, and leaves the previous one as it is. A kill or a full disk
    leaves the one before it whole, under one of the two names that `find_checkpoint` finds.

    Raises:
        OSError: it could not be written; the text says which checkpoint is whole.
    """
    content = {"format": _FORMAT, "version": _VERSION, **vars(checkpoint)}
    previous = path.with_name(PREVIOUS_NAME)
    try:
        write_whole(path, lambda file: torch.save(content, file), keep=previous if keeps_previous else None)
    except OSError as error:
        found = _whole_one((path, previous))
        advice = "there was none before; make room and train again"
        if found is not None:
            before, step = found
            advice = (
                f"the checkpoint before it (step {step}) is whole: make room and continue with train.resume={before}"
            )
        raise OSError(f"{error} (checkpoint of step {checkpoint.step}); {advice}") from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint on the CPU; code in a pickle does not run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no checkpoint, a damaged one, or of another version; the text names the run's other
            checkpoint where that one is whole.
    """
    try:
        return _read(path)
    except (FileNotFoundError, ValueError) as error:
        found = _whole_one(path.with_name(name) for name in (FILE_NAME, PREVIOUS_NAME) if name != path.name)
        if found is None:
            raise
        other, step = found
        text = f"{error}; {other.name} beside it is whole (step {step}): train.resume={other}"
        raise type(error)(text) from error


def find_checkpoint(resume: str) -> Path:
    """The checkpoint that `train.resume=` means: a file, or the newest one in a run's folder."""
    path = Path(resume).expanduser()
    if not path.is_dir():
        return path
    newest, previous = path / FILE_NAME, path / PREVIOUS_NAME
    # Without links, a kill between the two renames of a write leaves the previous one alone.
    return previous if previous.exists() and not newest.exists() else newest


def load_weights(model: nn.Module, checkpoint: Checkpoint, *, path: Path) -> None:
    """Load a checkpoint's weights into a model.

    Raises:
        ValueError: the model has another architecture: the first different parameters are named, and no weight changes;
            or a parameter is not finite.
    """
    wanted, got = model.state_dict(), checkpoint.model
    differences = [f"it lacks {name}" for name in wanted if name not in got]
    differences += [f"it has {name}, which the model does not" for name in got if name not in wanted]
    differences += [
        f"{name} is {there} there and {here} in the model"
        for name, tensor in wanted.items()
        if name in got
        for there, here in (
            (list(got[name].shape), list(tensor.shape)),
            (_kind(got[name]), _kind(tensor)),
        )
        if there != here
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ValueError(
            f"the checkpoint {path} is of another architecture: {'; '.join(differences[:3])}{more}; "
            "resume with the model it was trained with"
        )
    model.load_state_dict(like(got, wanted))
    name = not_finite(model)
    if name is not None:
        raise ValueError(f"the checkpoint {path} cannot be continued: its {name} holds a NaN or an infinity")


def not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter that holds a NaN or an infinity, or None.

    Of a split parameter this process's part counts.
    """
    return next((name for name, parameter in model.named_parameters() if not local(parameter).isfinite().all()), None)


def load_optimizer(optimizer: torch.optim.AdamW, checkpoint: Checkpoint, *, path: Path) -> None:
    """Load the means of AdamW; its options stay those of this session's config.

    Raises:
        ValueError: they do not fit the optimizer's parameters, or there are none after the first step.
    """
    own = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = checkpoint.optimizer.get("state")
    # Without any state AdamW would start anew. A parameter that the model never uses has none.
    if (
        not isinstance(state, dict)
        or not all(
            type(index) is int and 0 <= index < len(parameters) and _fits(entry, parameters[index])
            for index, entry in state.items()
        )
        or (checkpoint.step > 0 and not state)
    ):
        raise ValueError(
            f"the checkpoint {path} cannot be continued: its optimizer must hold AdamW's state of {len(parameters)} "
            "parameters, in their shapes and finite, the mean squares from 0 on"
        )
    parts = {index: like(entry, dict.fromkeys(entry, parameters[index])) for index, entry in state.items()}
    optimizer.load_state_dict({"state": parts, "param_groups": own})


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators.

    >>> sorted(random_state())[0]
    'cpu'
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_state(states: dict[str, Tensor]) -> None:
    """Set torch's generators; ignore the states of missing GPUs."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)


def _read(path: Path) -> Checkpoint:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}; train.resume= takes a checkpoint or the folder of a run")
    with open(path, "rb") as file:
        try:
            content = _load(file)
        # Random bytes can make the readers of zip files and pickles raise nearly anything.
        except Exception as error:
            raise ValueError(
                f"{path} is not a checkpoint of fuselayers, or a damaged one: torch cannot load it"
            ) from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint of fuselayers: it was written by something else")
    version = content.pop("version", "none")
    if type(version) is not int or version != _VERSION:
        raise ValueError(
            f"{path} has version {version!r:.40} of the checkpoint format, this fuselayers reads version {_VERSION}; "
            "use the fuselayers that wrote it"
        )
    _check_content(content, path=path)
    return Checkpoint(**content)


def _load(file: BinaryIO) -> Any:
    # torch does not compare the checksums. One flipped bit at each of 9,097 offsets, 27,291 files in all: with them,
    # none gave other numbers; without, 16,168 did.
    with zipfile.ZipFile(file) as records:
        damaged = records.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _check_content(content: Mapping[str, Any], *, path: Path) -> None:
    names = [field.name for field in fields(Checkpoint)]
    problems = [f"it lacks {name}" for name in names if name not in content]
    problems += [f"it has an unknown {name!r:.40}" for name in content if name not in names]
    if not problems:
        step = content["step"]
        if type(step) is not int or step < 0:
            problems.append(f"its step must be an int of at least 0, got {step!r:.40}")
        problems += [
            f"its {name} must be a text"
            for name in ("config_yaml", "text_fingerprint", "curve")
            if not isinstance(content[name], str)
        ]
        problems += [
            f"its {name} must be a mapping of names to tensors"
            for name in ("model", "random_state")
            if not isinstance(content[name], dict)
            or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content[name].items())
        ]
        if not isinstance(content["optimizer"], dict):
            problems.append("its optimizer must be a mapping")
    if problems:
        raise ValueError(f"the checkpoint {path} cannot be continued: {problems[0]}")


def _fits(entry: Any, parameter: Tensor) -> bool:
    """Whether this is AdamW's state of a parameter."""
    if not isinstance(entry, dict) or entry.keys() != {"step", "exp_avg", "exp_avg_sq"}:
        return False
    if not all(isinstance(value, Tensor) for value in entry.values()):
        return False
    step, mean, mean_square = entry["step"], entry["exp_avg"], entry["exp_avg_sq"]
    return (
        step.shape == ()
        and _kind(step) in ("torch.float32", "torch.float64")
        and 0 <= step.item() < math.inf
        and all(one.shape == parameter.shape and _kind(one) == _kind(parameter) for one in (mean, mean_square))
        and bool(mean.isfinite().all() and mean_square.isfinite().all() and (mean_square >= 0).all())
    )


def _kind(tensor: Tensor) -> str:
    """The dtype; the layout if it is sparse; whether it is a tensor without numbers."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout}{' on meta' if tensor.is_meta else ''}"


def _whole_one(paths: Iterable[Path]) -> tuple[Path, int] | None:
    """The first of these checkpoints that can be read, and its step."""
    for path in paths:
        try:
            return path, _read(path).step
        except (ValueError, OSError):
            continue
    return None
