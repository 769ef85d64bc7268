"""Two ranks that save and load together: an error of one is raised on both, and a thread's messages do not mix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fuselayers.cli.train.checkpoint import Texts, read_checkpoint, save, state_of
from tests.cli.train.checkpoint import sharded
from tests.cli.train.checkpoint.test_save import files_of_at_most


def _errors(folder: str) -> None:
    """A disk that is full for rank 1 alone, a damaged file, a number that is not finite in rank 1's part."""
    checkpoints = Path(folder) / "checkpoints"
    model, optimizer = sharded.build("fsdp")
    sharded.train(model, optimizer, 1)
    for step in (1, 2):
        save(checkpoints, state_of(model, optimizer), step=step)
    rank = dist.get_rank()
    with files_of_at_most(100 if rank == 1 else 1 << 30), pytest.raises(OSError, match="File too large") as error:
        save(checkpoints, state_of(model, optimizer), step=3)
    print(error.value)
    dist.barrier()

    path = checkpoints / "step-000002"
    file = path / "rank-00001.bin"
    content = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    dist.barrier()
    with pytest.raises(ValueError, match="checksum") as damaged:
        read_checkpoint(path)
    print(damaged.value)
    dist.barrier()

    bias = model.down.bias.to_local()
    if rank == 1:
        bias.data[-1] = torch.nan
    save(checkpoints, state_of(model, optimizer), step=3, texts=Texts(curve="3"))
    with pytest.raises(ValueError, match="NaN") as not_finite:
        sharded.resume(model, optimizer, checkpoints)
    print(not_finite.value)


def test_what_goes_wrong_on_one_rank_is_raised_on_both(tmp_path: Path) -> None:
    ended = sharded.run(_errors, tmp_path, size=2, store=tmp_path / "store")
    folder = tmp_path / "checkpoints"
    first, second, third = (folder / f"step-00000{step}" for step in (1, 2, 3))
    said = [
        f"cannot write the checkpoint {third}: File too large; the one before it is whole: make room and continue with "
        f"train.resume={second}",
        f"{second} is not a checkpoint of fuselayers, or a damaged one: the checksum of model.embedding.weight in "
        f"rank-00001.bin is wrong; step-000001 beside it is whole (step 1): train.resume={first}",
        f"the checkpoint {third} cannot be continued: its down.bias holds a NaN or an infinity",
    ]
    for one in ended:
        assert one.printed.splitlines() == [*said, "done"]
    assert {path.name for path in folder.iterdir()} == {"step-000002", "step-000003"}
