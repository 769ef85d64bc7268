"""Saving: by one process or by all ranks of a group."""

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ...files import clear_left_overs
from .folders import newest, path_of
from .groups import default_group, rank_and_size
from .index import DTYPES, Texts
from .storage import ShardWriter

# Without a group one process is what we want. Set once, because catching warnings in a thread is not safe.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit", category=UserWarning)


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    texts: Texts | None = None,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of a step, and keep the last ones.

    All ranks of the group call it. Each writes the chunks of its DTensors; a tensor that all have is written once. A
    kill or a full disk at any moment leaves the checkpoints before it whole.

    Args:
        folder: of the run's checkpoints; it is made if it is missing.
        tensors: by name, as `state_of` returns them.
        step: the number of finished steps.
        texts: what else the checkpoint holds; those of rank 0 count.
        keep: how many checkpoints stay, this one among them, at least 1.
        group: of the ranks; the default one when None, and this process alone where there is none.

    Returns:
        The checkpoint.

    Raises:
        OSError: it could not be written; the text says which checkpoint is whole. Raised on every rank.
        TypeError: a tensor is sparse, or of a dtype that a checkpoint does not hold.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> save(folder, {"model.weight": torch.ones(2, 3)}, step=7).name
    'step-000007'
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES.values():
            raise TypeError(
                f"a checkpoint holds dense tensors of {', '.join(DTYPES)}; {name} is {tensor.dtype}, {tensor.layout}"
            )
    group = default_group() if group is None else group
    writer = ShardWriter(folder, step=step, texts=texts or Texts(), keep=keep)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        if writer.written is not None:
            shutil.rmtree(writer.written, ignore_errors=True)
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, OSError):
            raise cause from error
        before = newest(folder)
        advice = "there was none before; make room and train again"
        if before is not None:
            advice = f"the one before it is whole: make room and continue with train.resume={before}"
        text = f"cannot write the checkpoint {path_of(folder, step)}: {cause.strerror or cause}; {advice}"
        raise OSError(text) from error
    return path_of(folder, step)


class Saver:
    """The only writer of a run's checkpoints.

    The ranks of the default group all make a saver and call it in the same order.

    Args:
        folder: of the run's checkpoints.
        keep: how many checkpoints stay, at least 1.

    >>> import tempfile, torch
    >>> saver = Saver(Path(tempfile.mkdtemp()))
    >>> saver.save({"model.weight": torch.ones(2, 3)}, step=2)
    >>> newest(saver.folder).name
    'step-000002'
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self._group = default_group()
        if rank_and_size()[0] == 0:
            clear_left_overs(folder)

    def save(self, tensors: Mapping[str, Tensor], *, step: int, texts: Texts | None = None) -> None:
        """Save the checkpoint of a step; see the function `save`.

        Raises:
            OSError: it could not be written.
        """
        save(self.folder, tensors, step=step, texts=texts, keep=self.keep, group=self._group)
