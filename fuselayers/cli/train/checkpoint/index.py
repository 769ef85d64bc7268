"""The index of a checkpoint: everything but the numbers, as JSON, with a checksum of itself and of each chunk.

A checkpoint is raw numbers and one JSON file, so reading one from a stranger runs no code. PyTorch's own storage keeps
its index as a pickle, which can. Its storage of safetensors files has no checksums, and no room for config and curve.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from ....names import shown
from ....regular_files import open_regular

FILE_NAME: Final = "index.json"
_FORMAT: Final = "fuselayers.checkpoint"
_VERSION: Final = 3
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
    )
}
# Read in pieces: a chunk may be larger than the memory that is free.
_PIECE: Final = 1 << 24


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, written by one rank: where it is in which file, its checksum, and which box it is.

    Args:
        file: its name in the checkpoint's folder.
        offset: of the first byte.
        length: bytes.
        crc32: of these bytes.
        starts: the index of its first element in the tensor, per dimension.
        shape: its extent, per dimension.
    """

    file: str
    offset: int
    length: int
    crc32: int
    starts: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """A tensor of a checkpoint: dtype and shape of the whole, and the chunks that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Texts:
    """What a run keeps beside its tensors.

    Args:
        config_yaml: the run's resolved config, as `fuselayers.configs.to_yaml` writes it.
        text_fingerprint: `Text.fingerprint` of the text.
        curve: the content of metrics.csv up to the checkpoint's step.
    """

    config_yaml: str = ""
    text_fingerprint: str = ""
    curve: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint without the numbers.

    The position in the data and the random state are functions of the seed and the step, so the step stands for both.

    Args:
        step: the number of finished steps.
        texts: config, fingerprint of the text, curve.
        tensors: by name: "model.<parameter>" and "optimizer.<parameter>.<state>".
    """

    step: int
    texts: Texts = field(default_factory=Texts)
    tensors: Mapping[str, Record] = field(default_factory=dict)

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of all tensors."""
        for record in self.tensors.values():
            yield from record.chunks


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """The content of the index. It is JSON, and its first line holds the checksum of the others.

    >>> to_bytes(Checkpoint(step=3)).splitlines()[0]
    b'{"crc32": "301f7a70",'
    """
    tensors = {
        name: {
            "dtype": str(record.dtype).removeprefix("torch."),
            "shape": record.shape,
            "chunks": [asdict(chunk) for chunk in record.chunks],
        }
        for name, record in checkpoint.tensors.items()
    }
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": checkpoint.step,
        **asdict(checkpoint.texts),
        "tensors": tensors,
    }
    body = json.dumps(content).removeprefix("{").encode()
    return _first_line(body) + body


def from_bytes(content: bytes, *, path: Path) -> Checkpoint:
    """The checkpoint that `to_bytes` wrote.

    Args:
        content: of the index.
        path: of the checkpoint, for the errors.

    Raises:
        ValueError: it is damaged, was written by something else or by another version, or is wrong.
    """
    line, end, body = content.partition(b"\n")
    if not end or line + end != _first_line(body):
        raise _damaged(path, f"the checksum of {FILE_NAME} is wrong")
    try:
        whole = json.loads(b"{" + body)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{FILE_NAME} is no JSON") from error
    if whole.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint of fuselayers: it was written by something else")
    version = whole.get("version")
    if type(version) is not int or version != _VERSION:
        raise ValueError(
            f"{path} has version {shown(version)} of the checkpoint format, this fuselayers reads version {_VERSION}; "
            "use the fuselayers that wrote it"
        )
    step = whole.get("step")
    if type(step) is not int or step < 0:
        raise _cannot_continue(path, f"its step must be an int of at least 0, got {shown(step)}")
    texts = {name: whole.get(name) for name in Texts.__dataclass_fields__}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise _cannot_continue(path, f"its {name} must be a text, got {shown(text)}")
    tensors = whole.get("tensors")
    if not isinstance(tensors, dict):
        raise _damaged(path, f"tensors must be a mapping, got {shown(tensors)}")
    return Checkpoint(step, Texts(**texts), {name: _record(name, one, path=path) for name, one in tensors.items()})


def is_whole(chunk: Chunk, *, path: Path) -> bool:
    """Whether the bytes of a chunk are those that were written."""
    checksum, left = 0, chunk.length
    try:
        # A pipe or a device would never end.
        with open_regular(path / chunk.file) as file:
            file.seek(chunk.offset)
            while left and (piece := file.read(min(left, _PIECE))):
                checksum = zlib.crc32(piece, checksum)
                left -= len(piece)
    except (FileNotFoundError, ValueError):
        return False
    return left == 0 and checksum == chunk.crc32


def _first_line(body: bytes) -> bytes:
    return f'{{"crc32": "{zlib.crc32(body):08x}",\n'.encode()


def _record(name: str, content: Any, *, path: Path) -> Record:
    """A tensor of the index. A wrong one comes from a stranger: a checksum is no signature."""
    if not isinstance(content, dict) or content.keys() != {"dtype", "shape", "chunks"}:
        raise _damaged(path, f"the tensor {shown(name)} must have dtype, shape and chunks")
    dtype = DTYPES.get(content["dtype"]) if isinstance(content["dtype"], str) else None
    if dtype is None:
        raise _damaged(path, f"the dtype of {shown(name)} is {shown(content['dtype'])}")
    shape = _sizes(content["shape"])
    chunks = [_chunk(one) for one in content["chunks"]] if isinstance(content["chunks"], list) else [None]
    whole = [one for one in chunks if one is not None]
    if shape is None or len(whole) < len(chunks) or not all(_fits(one, shape, dtype) for one in whole):
        raise _damaged(path, f"the shape or a chunk of {shown(name)} is wrong")
    covered = sum(math.prod(one.shape) for one in whole) == math.prod(shape)
    if not covered or (len(whole) > 1 and _overlap(whole)):
        raise _damaged(path, f"the chunks of {shown(name)} do not make up the tensor")
    return Record(dtype, shape, tuple(whole))


def _chunk(content: Any) -> Chunk | None:
    if not isinstance(content, dict) or content.keys() != Chunk.__dataclass_fields__.keys():
        return None
    starts, shape = _sizes(content["starts"]), _sizes(content["shape"])
    numbers = _sizes([content["offset"], content["length"], content["crc32"]])
    file = content["file"]
    # Nothing outside of the folder.
    is_name = isinstance(file, str) and Path(file).name == file and "\0" not in file
    if starts is None or shape is None or numbers is None or not is_name:
        return None
    offset, length, crc32 = numbers
    return Chunk(file, offset, length, crc32, starts, shape)


def _fits(chunk: Chunk, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return (
        len(chunk.starts) == len(chunk.shape) == len(shape)
        and all(start + size <= end for start, size, end in zip(chunk.starts, chunk.shape, shape, strict=True))
        and chunk.length == math.prod(chunk.shape) * dtype.itemsize
        # Read in place, as numbers of this dtype.
        and chunk.offset % dtype.itemsize == 0
    )


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two of the chunks have an element in common: then another element is in none."""
    starts = torch.tensor([one.starts for one in chunks])
    ends = starts + torch.tensor([one.shape for one in chunks])
    common = torch.maximum(starts[:, None], starts) < torch.minimum(ends[:, None], ends)
    return bool(common.all(-1).fill_diagonal_(False).any())


def _sizes(content: Any) -> tuple[int, ...] | None:
    if not isinstance(content, list) or not all(type(one) is int and 0 <= one < 2**63 for one in content):
        return None
    return tuple(content)


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not a checkpoint of fuselayers, or a damaged one: {reason}")


def _cannot_continue(path: Path, reason: str) -> ValueError:
    return ValueError(f"the checkpoint {path} cannot be continued: {reason}")
