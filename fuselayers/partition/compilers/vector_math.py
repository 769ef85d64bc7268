"""vector_math -- call each of MKL's vector functions once, before several threads make the first call together.

The MKL in torch's wheels selects a function's kernel at its first call. A thread that calls the function meanwhile gets
another kernel, with half the digits: the first `torch.cos` of a process then had a relative error of 1.5e-4 in one
thread's part, in 6 of 50 processes (torch 2.13.0, two cores of a Xeon of 2023). The second call is right. So eager and
fused results would differ, because eager's are wrong: https://github.com/pytorch/pytorch/issues/188792, which says that
MKL 2025 fixes it.

Importing this module calls each function with one element, which one thread computes. It takes 2 ms on that machine.
"""

import torch

from ..._torch.dispatch import disable_current_modes

if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
    # The functions of ATen/cpu/vml.h that MKL implements. A mode around this import could replace the calls.
    with disable_current_modes():
        for _dtype in (torch.float32, torch.float64):
            for _name in (
                *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
                *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
            ):
                getattr(torch, _name)(torch.full((1,), 0.5, dtype=_dtype, device="cpu"))
