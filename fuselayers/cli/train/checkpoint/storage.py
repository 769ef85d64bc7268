"""The storage of `torch.distributed.checkpoint` here: a file of raw numbers per rank, and an index."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ...files import flush_folder, temporary_name
from . import index
from .folders import commit, path_of
from .index import Checkpoint, Chunk, Record, Texts

# Every dtype can be read in place from such an offset.
_ALIGNMENT: Final = 64


class ShardWriter(StorageWriter):
    """Writes a checkpoint: each rank a file beside the target, then rank 0 the index; it renames the whole.

    Only rank 0 names the temporary folder, lists the chunks and renames. `torch.distributed.checkpoint` calls these
    steps in order, waits for all ranks in between, and raises on every rank what went wrong on one.

    Args:
        folder: of the run's checkpoints.
        step: of the checkpoint.
        texts: config, fingerprint, curve; those of rank 0 count.
        keep: how many checkpoints stay.
    """

    def __init__(self, folder: Path, *, step: int, texts: Texts, keep: int) -> None:
        self.folder = folder
        self.step = step
        self.texts = texts
        self.keep = keep
        self.written: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: rank 0 begins in `prepare_global_plan`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make the temporary folder, and tell each rank its file."""
        self.written = temporary_name(path_of(self.folder, self.step))
        self.written.mkdir(parents=True)
        return [replace(plan, storage_data=self.written / f"rank-{rank:05}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On each rank: write and flush its file."""
        results = []
        if plan.items:
            path: Path = plan.storage_data
            with open(path, "xb") as file:
                for item in plan.items:
                    # Pad to the alignment.
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                    content = _bytes(planner.resolve_data(item))
                    chunk = _described(item, content, file=path.name, offset=file.tell())
                    file.write(content)
                    results.append(WriteResult(item.index, chunk.length, chunk))
                file.flush()
                os.fsync(file.fileno())
            # Rank 0 flushes it too, but on its own machine.
            flush_folder(path.parent)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all files are written: write the index and rename the folder."""
        chunks: dict[str, list[Chunk]] = {}
        for result in (one for of_rank in results for one in of_rank):
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {
            name: Record(one.properties.dtype, tuple(one.size), tuple(chunks[name]))
            for name, one in metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
        assert self.written is not None
        with open(self.written / index.FILE_NAME, "xb") as file:
            file.write(index.to_bytes(Checkpoint(self.step, self.texts, tensors)))
            file.flush()
            os.fsync(file.fileno())
        commit(self.written, path_of(self.folder, self.step), step=self.step, keep=self.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `torch.distributed.checkpoint` may choose this storage for a path: no, it is always named."""
        return False


class ShardReader(StorageReader):
    """Reads the parts of a checkpoint that each rank wants. It checks no checksum: `read_checkpoint` has.

    Args:
        path: of the checkpoint.
        checkpoint: its index.
    """

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self.path = path
        self.checkpoint = checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in the words of `torch.distributed.checkpoint`."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(record.dtype),
                    torch.Size(record.shape),
                    [ChunkStorageMetadata(torch.Size(one.starts), torch.Size(one.shape)) for one in record.chunks],
                )
                for name, record in self.checkpoint.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the index is read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """On each rank: copy its parts of the chunks."""
        chunks = {
            MetadataIndex(name, chunk.starts): (record.dtype, chunk)
            for name, record in self.checkpoint.tensors.items()
            for chunk in record.chunks
        }
        for item in plan.items:
            dtype, chunk = chunks[item.storage_index]
            part = _mapped(self.path, chunk, dtype=dtype)
            for dimension, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dimension, start, size)
            target = planner.resolve_tensor(item)
            target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `torch.distributed.checkpoint` may choose this storage for a path: no, it is always named."""
        return False


def empty_tensors(records: Mapping[str, Record]) -> dict[str, Tensor]:
    """A CPU tensor for each record, to read into."""
    return {name: torch.empty(record.shape, dtype=record.dtype, device="cpu") for name, record in records.items()}


def _bytes(tensor: Any) -> memoryview:
    content: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return content


def _described(item: WriteItem, content: memoryview, *, file: str, offset: int) -> Chunk:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Chunk(file, offset, content.nbytes, zlib.crc32(content), tuple(chunk.offsets), tuple(chunk.sizes))


def _mapped(path: Path, chunk: Chunk, *, dtype: torch.dtype) -> Tensor:
    """A chunk in place in its file: only the pages that are copied from are read."""
    if chunk.length == 0:
        return torch.empty(chunk.shape, dtype=dtype, device="cpu")
    end = chunk.offset + chunk.length
    content = torch.from_file(str(path / chunk.file), shared=False, size=end, dtype=torch.uint8)
    return content[chunk.offset : end].view(dtype).view(chunk.shape)
