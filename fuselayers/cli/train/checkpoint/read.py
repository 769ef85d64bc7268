"""Reading: the index with all checksums, and then the tensors, each rank its parts."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from . import index
from .folders import listed
from .groups import default_group, first_of, rank_and_size
from .index import Checkpoint, from_bytes, is_whole
from .storage import ShardReader, empty_tensors


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's index, and compare all checksums; all ranks of the default group call it and share the work.

    No code in a checkpoint runs: it holds JSON and numbers.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is none, a damaged one, or of another version; the text names another checkpoint of the run that
            is whole, if there is one.
    """
    rank, size = rank_and_size()
    checkpoint, problem = _index_of(path)
    problem = first_of(problem)
    if problem is None and checkpoint is not None:
        problem = first_of(_damage(path, checkpoint, first=rank, of=size))
        if problem is None:
            return checkpoint
    assert problem is not None
    other = first_of(_other_whole_one(path) if rank == 0 else None)
    if other is None:
        raise problem
    found, step = other
    text = f"{problem}; {found.name} beside it is whole (step {step}): train.resume={found}"
    raise type(problem)(text) from problem


def read_tensors(path: Path, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Read into tensors: each rank of the default group reads what its DTensors need, however it was written.

    Args:
        path: of the checkpoint.
        checkpoint: of `read_checkpoint`, which has compared the checksums.
        tensors: by name, in the shapes and dtypes of the checkpoint's; on every rank the same names.
    """
    reader, planner = ShardReader(path, checkpoint), DefaultLoadPlanner(flatten_state_dict=False)
    try:
        load(dict(tensors), storage_reader=reader, planner=planner, no_dist=default_group() is None)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def whole_tensors(path: Path, checkpoint: Checkpoint, *, prefix: str = "") -> dict[str, Tensor]:
    """All tensors whose names begin with the prefix, whole and on the CPU, by the rest of their names.

    >>> import tempfile, torch
    >>> from fuselayers.cli.train.checkpoint import save
    >>> path = save(Path(tempfile.mkdtemp()), {"model.weight": torch.ones(2)}, step=1)
    >>> whole_tensors(path, read_checkpoint(path), prefix="model.")
    {'weight': tensor([1., 1.])}
    """
    tensors = empty_tensors({name: one for name, one in checkpoint.tensors.items() if name.startswith(prefix)})
    reader = ShardReader(path, checkpoint)
    # A process that is in a group reads them all the same, on its own.
    load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _index_of(path: Path) -> tuple[Checkpoint | None, Exception | None]:
    file = path / index.FILE_NAME
    if not file.is_file():
        found = "a file" if path.is_file() else "a folder without one" if path.is_dir() else "not there"
        return None, FileNotFoundError(
            f"no checkpoint {path}, it is {found}; name a run, or a checkpoint such as "
            "runs/<date>/checkpoints/step-000200"
        )
    try:
        return from_bytes(file.read_bytes(), path=path), None
    except (ValueError, OSError) as error:
        return None, error


def _damage(path: Path, checkpoint: Checkpoint, *, first: int = 0, of: int = 1) -> Exception | None:
    """The first damaged chunk of this rank's share."""
    chunks = sorted(checkpoint.chunks(), key=lambda chunk: (chunk.file, chunk.offset))[first::of]
    for chunk in chunks:
        try:
            whole = is_whole(chunk, path=path)
        except OSError as error:
            return error
        if not whole:
            names = [name for name, record in checkpoint.tensors.items() if chunk in record.chunks]
            return ValueError(
                f"{path} is not a checkpoint of fuselayers, or a damaged one: the checksum of {names[0]} in "
                f"{chunk.file} is wrong"
            )
    return None


def _other_whole_one(path: Path) -> tuple[Path, int] | None:
    """The newest other checkpoint in the folder that can be read, and its step."""
    for _, other in reversed(listed(path.parent)):
        if other.name != path.name:
            checkpoint, _ = _index_of(other)
            if checkpoint is not None and _damage(other, checkpoint) is None:
                return other, checkpoint.step
    return None
