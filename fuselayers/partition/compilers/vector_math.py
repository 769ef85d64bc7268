"""vector_math -- MKL's vector functions, each called once before several threads can be the first to.

The MKL in torch's wheels looks for a function's kernel at its first call, and takes another one, with half the digits,
for a thread that calls it while it looks: the first `torch.cos` of a process then had a relative error of 1.5e-4 in one
thread's part, in 6 of 50 processes (torch 2.13.0, two cores of a Xeon of 2023). The second call is right. So eager and
fused functions would differ, by eager's fault: https://github.com/pytorch/pytorch/issues/188792, which says that MKL
2025 mends it.

Importing this calls them, with one element, so that no second thread is at it. It takes 2 ms there.
"""

import torch

from ..._torch.dispatch import disable_current_modes

if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
    # Those of ATen/cpu/vml.h that MKL serves. A mode around this import might call something else, or nothing.
    with disable_current_modes():
        for _dtype in (torch.float32, torch.float64):
            for _name in (
                *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
                *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
            ):
                getattr(torch, _name)(torch.full((1,), 0.5, dtype=_dtype, device="cpu"))
