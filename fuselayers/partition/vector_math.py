"""vector_math -- MKL's vector functions, each called once before several threads can be the first to.

The MKL in torch's wheels looks for a function's kernel at its first call, and takes another one, with half the digits,
for a thread that calls it while it looks: the first `torch.cos` of a process then had a relative error of 1.5e-4 in one
thread's part, in 6 of 50 processes (torch 2.13.0, two cores of a Xeon of 2023). The second call is right. So eager and
fused functions would differ, by eager's fault: https://github.com/pytorch/pytorch/issues/188792, which says that MKL
2025 mends it.

Importing this calls them, with one element, so that no second thread is at it. It takes 2 ms there.
"""

from typing import Final

import torch

from .._torch.dispatch import disable_current_modes

# Those of ATen/cpu/vml.h that MKL serves.
VECTOR_FUNCTIONS: Final = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)


def call_vector_functions() -> None:
    """Call every one of them with one element, in float32 and float64."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    with disable_current_modes():  # which might call something else, or nothing
        for dtype in (torch.float32, torch.float64):
            one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for name in VECTOR_FUNCTIONS:
                getattr(torch, name)(one)


call_vector_functions()
