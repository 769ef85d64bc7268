"""Checkpoints: folders `step-000200` that are complete or do not exist.

    manifest.json           step, config, curve, the SHA-256 of each file, and that of the manifest itself
    shard-00001-...         a safetensors file of the tensors that rank 0 wrote, then those of the other ranks

`torch.distributed.checkpoint` writes and reads the tensors, each rank its own parts. Its default storage keeps an index
as a pickle, which can run code; safetensors cannot.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from ...configs import Config, compose
from ...configs.values import parse_yaml
from ...names import shown
from ..files import flush_folder, temporary_name, write_text
from ..text import complain
from .engine import ALONE, Processes

FOLDER_NAME: Final = "checkpoints"
MANIFEST: Final = "manifest.json"
_FORMAT: Final = "fuselayers.checkpoint 5"
_STEP: Final = re.compile(r"step-(\d{6,18})")

# Without torchrun a single process is intended.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint without its tensors.

    Batches and random numbers follow from the seed and the step, so the step stands for both.

    Args:
        step: the number of finished steps.
        config_yaml: the run's resolved config, as `fuselayers.configs.to_yaml` writes it.
        text_fingerprint: of the text, see `Text.fingerprint`.
        curve: the rows of metrics.csv up to the step.
    """

    step: int
    config_yaml: str = ""
    text_fingerprint: str = ""
    curve: list[list[Any]] = field(default_factory=list)


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run / FOLDER_NAME


def run_of(resume: str) -> Path | None:
    """The run that `train.resume=` names, itself or by one of its checkpoints; None for a copied checkpoint."""
    path = Path(os.path.abspath(Path(resume).expanduser()))
    run = path.parent.parent if path.parent.name == FOLDER_NAME else path
    return run if checkpoints_of(run).is_dir() else None


def listed(folder: Path) -> list[tuple[int, Path]]:
    """The steps and paths of all checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    matches = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def find_checkpoint(resume: str, processes: Processes = ALONE) -> tuple[Path, Content]:
    """Return the checkpoint that `train.resume=` names, or the newest undamaged one of a run, with its content.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or all checkpoints of the run are.
    """
    path = Path(resume).expanduser()
    candidates = processes.from_main([candidate for _, candidate in listed(checkpoints_of(path))]) or [path]
    for candidate in reversed(candidates[1:]):
        try:
            return candidate, read_checkpoint(candidate, processes)
        except (ValueError, FileNotFoundError) as error:
            if processes.is_main:
                complain(f"{error}; trying the previous checkpoint")
    return candidates[0], read_checkpoint(candidates[0], processes)


def read_checkpoint(path: Path, processes: Processes = ALONE) -> Content:
    """Read a checkpoint's manifest, and compare all checksums; the processes share this work. No code in it runs.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is no checkpoint, is damaged, or has another format.
    """
    if not (path / MANIFEST).is_file():
        reason = f"it has no {MANIFEST}" if path.is_dir() else "it is no folder"
        raise FileNotFoundError(
            f"no checkpoint {path}: {reason}; name a run that has saved one, or a checkpoint such as "
            f"runs/<date>/{FOLDER_NAME}/step-000200"
        )
    problem = f"{path} is not a checkpoint of fuselayers, or is damaged: the checksum of {{}} is wrong"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        is_whole = manifest.pop("sha256") == _digest(manifest)
        form, files, content = manifest.pop("format"), manifest.pop("files"), Content(**manifest)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(problem.format(MANIFEST))
    if form != _FORMAT:
        raise ValueError(
            f"{path} is of format {shown(form)}, not {_FORMAT}; use the version of fuselayers that wrote it"
        )
    digests = _digests(path, processes)
    if files != digests:
        raise ValueError(problem.format(min(name for name, _ in files.items() ^ digests.items())))
    return content


def config_of(path: Path, content: Content) -> Config:
    """The config of a checkpoint's model.

    Raises:
        ValueError: it does not compose.
    """
    try:
        return compose(parse_yaml(content.config_yaml.encode(errors="replace"), "config_yaml"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"the config in the checkpoint {path} does not compose: {error}") from error


def save(
    folder: Path, tensors: Mapping[str, Tensor], content: Content, *, keep: int = 2, processes: Processes = ALONE
) -> Path:
    """Write a checkpoint under another name, flush it, rename it, and keep the last ones; return its path.

    All processes call it. Each writes its parts of DTensors; one of them writes the other tensors. A kill or a full
    disk at any moment leaves the checkpoints before it whole.

    Args:
        tensors: by name, as `state_of` returns them.
        content: the rest of the checkpoint; rank 0 writes its own.
        keep: how many checkpoints stay, at least 1.

    Raises:
        OSError: it could not be written; the checkpoints before it are whole.
    """
    path = folder / f"step-{content.step:06}"
    written = processes.from_main(temporary_name(path))
    writer = HuggingFaceStorageWriter(str(written), save_distributed=True)
    try:
        save_tensors(_without_shared_memory(tensors), storage_writer=writer)
        manifest = {"format": _FORMAT, **asdict(content), "files": _digests(written, processes)}
        if processes.is_main:
            write_text(written / MANIFEST, json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
            _commit(written, path, step=content.step, keep=keep)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(written, ignore_errors=True)
        cause = _cause(error)
        if not isinstance(cause, OSError):
            raise cause from error
        raise OSError(
            f"cannot write the checkpoint {path}: {cause.strerror or cause}; earlier checkpoints are intact: free some "
            "space, and continue with train.resume="
        ) from error
    return path


def saved_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """The whole size and the dtype of each tensor of a checkpoint, by name."""
    metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors that have a checkpoint's names and sizes; each process reads what its DTensors need."""
    try:
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)))
    except CheckpointException as error:
        raise _cause(error) from error


def whole_tensors(path: Path, *, prefix: str = "") -> dict[str, Tensor]:
    """Return all tensors whose names begin with the prefix, whole and on the CPU; the keys lack the prefix."""
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved_tensors(path).items()
        if name.startswith(prefix)
    }
    read_tensors(path, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that are not contiguous or share memory, as tied weights do: safetensors cannot write them."""
    result, pointers = {}, set()
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.data_ptr() in pointers or not local.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        pointers.add(local.data_ptr())
        result[name] = tensor
    return result


def _digests(folder: Path, processes: Processes) -> dict[str, str]:
    """The SHA-256 of each file of tensors; each process reads some of them."""
    own = {}
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in names[processes.rank :: processes.world_size]:
        with open(folder / name, "rb") as file:
            own[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {name: digest for part in processes.gathered(own) for name, digest in part.items()}


def _digest(manifest: Any) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed; torch wraps it."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _commit(written: Path, path: Path, *, step: int, keep: int) -> None:
    """Make a written checkpoint the newest one by a rename, and remove old ones.

    Checkpoints of this step or later belong to a run that went back and now continues differently. They are removed
    first, so that a kill never leaves one of them as the newest.
    """
    folder = path.parent
    flush_folder(written)
    gone = [_renamed(other) for number, other in listed(folder) if number >= step]
    os.rename(written, path)
    gone += [_renamed(old) for _, old in listed(folder)[:-keep]]
    flush_folder(folder)
    # The first checkpoint made the folder.
    flush_folder(folder.parent)
    for other in gone:
        # A folder that cannot be removed does no harm: it has a temporary name, and the next session tries again.
        shutil.rmtree(other, ignore_errors=True)


def _renamed(path: Path) -> Path:
    """Give a checkpoint a temporary name, so that it is not taken for a whole one while it is removed."""
    other = temporary_name(path)
    os.rename(path, other)
    return other
