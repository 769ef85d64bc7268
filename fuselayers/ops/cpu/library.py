"""library -- load the C++ of this folder, and pass tensors to it.

`setup.py` compiles the same sources for AVX-512, for AVX2 and for any machine of the platform. The capability that
`torch.backends.cpu` reports selects a library, so ATEN_CPU_CAPABILITY selects it too, as it does torch's own kernels.
The libraries have a C interface and use neither Python nor torch. They link to OpenMP by the name of the library that
torch has loaded, so both share it.
"""

import ctypes
import functools
import hashlib
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..._torch.dispatch import constant_in_dynamo
from ...errors import FallbackWarning

__all__ = ["TYPES", "Heads", "Rows", "has_kernels", "name_of", "pointer", "rows", "run", "vector"]

_FOLDER: Final = Path(__file__).parent
_REBUILD: Final = (
    "install a C++ compiler (apt install g++) and this library again: "
    "pip install --force-reinstall --no-deps --no-cache-dir"
)
TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers that the kernels have for dtypes."""


class Rows(ctypes.Structure):
    """A tensor [R, N] as the kernels take it; all zeros for an absent tensor."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("type", ctypes.c_int32))
    tensor: Tensor  # keeps the memory alive


class Heads(ctypes.Structure):
    """A tensor [B, H, T, C] whose channels lie side by side."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
        ("type", ctypes.c_int32),
    )

    @classmethod
    def of(cls, x_BHTC: Tensor) -> "Heads":
        """Return a tensor as the kernels take it; the caller must keep the tensor alive."""
        return cls(x_BHTC.data_ptr(), *x_BHTC.stride()[:3], TYPES[x_BHTC.dtype])


# The arguments of each function but the last, the number of threads. R: rows, H: heads, p: a pointer, s: a name, n: a
# whole number, i: a flag, f: a number.
_ARGUMENTS: Final = {
    "elementwise_forward": "RRpRsppnnfnn",
    "elementwise_backward": "RRpRpsppnnfnn",
    "keep_factors": "pppnnnn",
    "norm_forward": "RRpppRRppppnffiinn",
    "norm_backward": "RRRpppRRpppnfiiinn",
    "gated_forward": "RRRsnn",
    "gated_backward": "RRRRRsnn",
    "rotary": "HHppnnnnnnii",
    "attention_forward": "pHp",
    "attention_backward": "pHHppHHHHHn",
    "cross_entropy_forward": "Rpnffpppnn",
    "cross_entropy_backward": "pnRpppnffRnn",
    "transpose": "RRnn",
}
_KINDS: Final = {
    "R": Rows,
    "H": Heads,
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
}
_ABSENT: Final = Rows()


def rows(x: Tensor | None) -> Rows:
    """Return x, [..., N], as the kernels take it; copied unless columns are adjacent and rows have a single stride."""
    if x is None:
        return _ABSENT
    if x.is_contiguous():
        stride = x.shape[-1] if x.dim() else 1
    else:
        x = x.reshape(-1, x.shape[-1])
        x = x if x.stride(1) == 1 else x.contiguous()
        stride = x.stride(0)
    made = Rows(x.data_ptr(), stride, TYPES[x.dtype])
    made.tensor = x
    return made


def vector(x: Tensor | None) -> Tensor | None:
    """Return a weight or a bias as the kernels read it: float32 and contiguous."""
    return None if x is None else x.float().contiguous()


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor; the caller must keep the tensor alive."""
    return None if x is None else x.data_ptr()


def name_of(activation: str | None) -> bytes | None:
    """Return an activation's name as the kernels take it."""
    return None if activation is None else activation.encode()


def run(name: str, *arguments: Any) -> None:
    """Call a function of the library, on torch's number of threads. Only where `has_kernels()`."""
    getattr(_library(), name)(*arguments, torch.get_num_threads())


@constant_in_dynamo
def has_kernels() -> bool:
    """Return whether the library was built for this machine; warn once if it was not."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    name = {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "plain")
    missing = None
    for path in [path for kind in dict.fromkeys((name, "plain")) for path in sorted(_FOLDER.glob(f"_{kind}.*so"))]:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            missing = str(error)
            continue
        if ctypes.c_char_p.in_dll(library, "fuselayers_sources").value == cpp_sources_hash().encode():
            for function, kinds in _ARGUMENTS.items():
                getattr(library, function).argtypes = (*(_KINDS[kind] for kind in kinds), ctypes.c_int)
                getattr(library, function).restype = None
            if missing and not path.name.startswith(f"_{name}."):
                _warn(f"the ops run slower on this CPU, without {name.upper()}: {missing}")
            return library
        missing = f"{path.name} was built from other C++ sources"
    _warn(f"the ops run slower on this CPU, in plain torch: {missing or 'no library was built'}")
    return None


def _warn(message: str) -> None:
    warnings.warn(f"{message}; {_REBUILD}", FallbackWarning, stacklevel=4)


def cpp_sources_hash() -> str:
    """Return the hash of the C++ sources, which `setup.py` compiles into the library.

    A library of other sources is not called.
    """
    paths = sorted(path for path in _FOLDER.iterdir() if path.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
