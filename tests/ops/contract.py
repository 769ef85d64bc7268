"""The checks that every op passes, and the shapes, the device and the seeds that the tests of ops share."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fuselayers import testing
from fuselayers.ops.cpu import has_kernels
from fuselayers.ops.implementations.launch import INTERPRETED
from tests.cuda_graphs import check_cuda_graph

on_kernels = pytest.mark.kernels
on_triton = pytest.param("triton", marks=on_kernels)
on_cpp = pytest.param("cpp", marks=pytest.mark.skipif(INTERPRETED or not has_kernels(), reason="no kernels in C++"))
both_backends = pytest.mark.parametrize("backend", ["eager", on_triton])
every_backend = pytest.mark.parametrize("backend", ["eager", on_cpp, on_triton])

SHAPES = ((1,), (7,), (3, 5), (2, 3, 129), (1, 1025), (0, 4))

# Kernels run on a GPU, or in Triton's interpreter on the CPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Every form of every op passes these checks. Test files call the other checks where they apply.
CHECKS = (
    testing.check_layouts,
    testing.check_single_gradients,
    testing.check_mixed_dtypes,
    testing.check_autocast,
    testing.check_poisoned,
    testing.check_not_finite,
    testing.check_double_backward,
    testing.check_transforms,
    check_cuda_graph,
)


def seed_of(number: int = 5) -> Tensor:
    return torch.tensor(number * 0x9E3779B97F4A7C15 % (1 << 63), dtype=torch.int64, device=DEVICE)


def tensors(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors of the given shapes, exactly representable in every dtype under test."""
    return testing.samples(*shapes, dtype=dtype, device=DEVICE)
