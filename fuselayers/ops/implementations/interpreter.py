"""Patches for bugs of Triton's interpreter that our kernels hit. `launch` applies them where TRITON_INTERPRET is set.

The interpreter stores bfloat16 as 16-bit integers, and its cast from float32 truncates instead of rounding to nearest
even. The patches mend the casts, accept loop bounds from NumPy 2.4 arrays, which Triton 3.6 does not, and add the
functions of libdevice that we use. Checked with Triton 3.6, 3.7 and 3.8.

These are not patched and raise an error: inline assembly, autotuning of several configs, atomics of bfloat16, the rest
of libdevice. These are not patched and raise no error: bfloat16 and 8-bit floats compute as integers, so cast to
float32 first, as our kernels do; a masked load without `other` gives 0, on a GPU any value; a variable may change its
type in a loop; programs run one after another, without races, and atomics have an order.
"""

import os
from typing import Any, Final

import numpy as np

from .triton_language import libdevice, tl

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "y", "yes")
"""True where Triton's interpreter runs the kernels, on the CPU. Triton reads the variable when a kernel is defined."""

_NAN: Final = np.uint16(0x7FC0)


def patch_interpreter() -> None:
    """Patch Triton's interpreter for the whole process. A second call changes nothing."""
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if getattr(builder, "has_bfloat16", False):
        return
    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def rounded(source: Any, dtype: Any) -> Any:
        kinds = source.dtype.scalar, dtype.scalar
        # Casts to and from 8-bit floats are right as they are.
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1] or any(kind.is_fp8() for kind in kinds):
            return None
        data = _widened(source.data) if kinds[0] == tl.bfloat16 else source.data
        if kinds[1] == tl.bfloat16:
            return handle(_rounded(data.astype(np.float32)), kinds[1])
        return handle(data.astype(interpreter._get_np_dtype(kinds[1])), kinds[1])

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        patched = rounded(source, dtype)
        return cast(self, source, dtype) if patched is None else patched

    def create_fp_to_fp(self: Any, source: Any, dtype: Any, rounding_mode: Any) -> Any:
        patched = rounded(source, dtype) if rounding_mode is None else None
        return convert(self, source, dtype, rounding_mode) if patched is None else patched

    patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    libdevice.fast_dividef = lambda a, b: a / b
    libdevice.fast_expf = lambda a: tl.exp(a)
    interpreter._patch_lang_tensor = _patch_lang_tensor
    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.has_bfloat16 = True


def _widened(bits: Any) -> Any:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def _rounded(values: Any) -> Any:
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _NAN, nearest)
