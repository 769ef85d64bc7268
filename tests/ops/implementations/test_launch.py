import pytest
import torch

from benchmarks.lint_kernels.record import recorded_launches
from fuselayers import ops
from fuselayers.ops.implementations.launch import (
    kernel,
)
from fuselayers.ops.implementations.triton_language import HAS_TRITON, tl

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels without Triton")


def test_a_kernels_numbers_are_not_specialised_on() -> None:
    @kernel
    def my_kernel(x_ptr, size, stride, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    if hasattr(my_kernel, "params"):  # the interpreter specialises on nothing
        assert [one.name for one in my_kernel.params if one.do_not_specialize] == ["size", "stride", "scale"]
        assert [one.name for one in my_kernel.params if one.is_constexpr] == ["BLOCK"]


@needs_triton
def test_launches_are_recorded_instead_of_made() -> None:
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    seed = torch.empty((), dtype=torch.int64, device="meta")
    with recorded_launches() as launches:
        y = ops.bias_activation_dropout(x, activation="relu", p=0.1, seed=seed, backend="triton")
        y.backward(torch.empty_like(y))
    assert [one.function.__name__ for one in launches] == ["_elementwise_kernel", "_backward_kernel"]
    forward = launches[0]
    assert forward.grid == (32, 2, 1)
    assert [one.shape if isinstance(one, torch.Tensor) else one for one in forward.arguments] == [
        *(x.shape, None, None, y.shape, seed.shape, None, 0),
        *(64, 512, 512, 0, 6554, pytest.approx(65536 / (65536 - 6554))),
    ]
    assert forward.constants == ("relu", False, 8, 2, 2048)
    assert forward.num_warps == 4
    assert x.grad is not None
    assert x.grad.shape == x.shape
