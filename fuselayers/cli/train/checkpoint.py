"""A run's checkpoint: the whole state of training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files import write_whole

FILE_NAME = "checkpoint.pt"
_FORMAT = "fuselayers.checkpoint"
_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Args:
        step: the number of finished steps.
        config_yaml: the run's resolved config, as `fuselayers.configs.to_yaml` writes it.
        text_fingerprint: `Text.fingerprint` of the text.
        model: the model's state_dict.
        optimizer: the optimizer's state_dict.
        random_state: torch's generators: "cpu", and one "cuda:<index>" per GPU.
    """

    step: int
    config_yaml: str
    text_fingerprint: str
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    random_state: dict[str, Tensor]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; a kill or a full disk leaves the previous one unchanged.

    Raises:
        OSError: it could not be written; the text says which checkpoint is whole.
    """
    content = {"format": _FORMAT, "version": _VERSION, **vars(checkpoint)}
    try:
        write_whole(path, lambda file: torch.save(content, file))
    except OSError as error:
        raise OSError(f"{error} (checkpoint of step {checkpoint.step}); {_still_good(path)}") from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint on the CPU; code in a pickle does not run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no checkpoint, a damaged one, or of a newer version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}; train.resume= takes a checkpoint or the folder of a run")
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        # Random bytes can make the readers of zip files and pickles raise nearly anything.
        except Exception as error:
            raise ValueError(
                f"{path} is not a checkpoint of fuselayers, or a damaged one: torch cannot load it"
            ) from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint of fuselayers: it was written by something else")
    version = content.pop("version")
    if version != _VERSION:
        raise ValueError(
            f"{path} has version {version} of the checkpoint format, this fuselayers reads version {_VERSION}; "
            "use the fuselayers that wrote it"
        )
    return Checkpoint(**content)


def find_checkpoint(resume: str) -> Path:
    """The checkpoint that `train.resume=` means: a file, or the one in a run's folder."""
    path = Path(resume).expanduser()
    return path / FILE_NAME if path.is_dir() else path


def load_weights(model: nn.Module, checkpoint: Checkpoint, *, path: Path) -> None:
    """Load a checkpoint's weights into a model.

    Raises:
        ValueError: the model has another architecture; names the first different parameters. No weight changes.
    """
    wanted, got = model.state_dict(), checkpoint.model
    differences = [f"it lacks {name}" for name in wanted if name not in got]
    differences += [f"it has {name}, which the model does not" for name in got if name not in wanted]
    differences += [
        f"{name} is {list(got[name].shape)} there and {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in got and got[name].shape != tensor.shape
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ValueError(
            f"the checkpoint {path} is of another architecture: {'; '.join(differences[:3])}{more}; "
            "resume with the model it was trained with"
        )
    model.load_state_dict(got)


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


def _still_good(path: Path) -> str:
    if not path.exists():
        return "there was none before; make room and train again"
    try:
        step = read_checkpoint(path).step
    except (ValueError, OSError):
        return f"{path} is as it was before"
    return f"the checkpoint before it (step {step}) is whole: make room and continue with train.resume={path}"
