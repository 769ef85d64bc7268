"""The checks of `fuselayers.testing`, and the shapes, the device and the seeds that the tests of ops share."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fuselayers import testing
from fuselayers.ops.cpu import has_kernels
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.testing import DTYPES as DTYPES
from fuselayers.testing import assert_as_good_as as assert_as_good_as
from fuselayers.testing import check_autocast as check_autocast
from fuselayers.testing import check_dynamic as check_dynamic
from fuselayers.testing import check_fused as check_fused
from fuselayers.testing import check_layouts as check_layouts
from fuselayers.testing import check_mixed_dtypes as check_mixed_dtypes
from fuselayers.testing import check_poisoned as check_poisoned
from fuselayers.testing import check_single_gradients as check_single_gradients
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
    check_layouts,
    check_single_gradients,
    check_mixed_dtypes,
    check_autocast,
    check_poisoned,
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
