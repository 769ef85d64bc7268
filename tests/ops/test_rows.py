from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.lint_kernels.record import recorded_launches
from fuselayers import ops
from fuselayers.ops import rows as module
from fuselayers.ops.implementations.triton_language import HAS_TRITON
from fuselayers.ops.rows import elementwise_plan
from tests.ops.contract import tensors


def _seed(x: Tensor) -> Tensor:
    return torch.tensor(7, device=x.device)


def _classes(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


# Every op with an elementwise kernel, as a function of rows, a bias and a backend.
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "dropout": lambda x, bias, backend: ops.dropout(x, 0.3, seed=_seed(x), backend=backend),
    "bias_activation_dropout": lambda x, bias, backend: ops.bias_activation_dropout(
        x, bias, activation="relu", p=0.3, seed=_seed(x), backend=backend
    ),
    "bias_dropout_residual": lambda x, bias, backend: ops.bias_dropout_residual(
        x, x, bias=bias, p=0.3, seed=_seed(x), backend=backend
    ),
    "gated_activation": lambda x, bias, backend: ops.gated_activation(x, x, activation="relu", backend=backend),
    "cross_entropy": lambda x, bias, backend: ops.cross_entropy(x, _classes(x), backend=backend),
}
elementwise_ops = pytest.mark.parametrize("op", list(ELEMENTWISE.values()), ids=ELEMENTWISE)


def results_of(op: Callable[[Tensor, Tensor, str], Tensor], x: Tensor, backend: str) -> list[Tensor]:
    """The result of an op, and its gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, x[0])]
    y = op(*leaves, backend)
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True, materialize_grads=True)]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@elementwise_ops
def test_a_flat_tensor_fits_into_every_grid(op: Callable[[Tensor, Tensor, str], Tensor]) -> None:
    with recorded_launches() as launches:
        results_of(op, torch.empty(1, 1 << 28, dtype=torch.bfloat16, device="meta"), "triton")
    assert len(launches) >= 2
    for launch in launches:
        assert launch.grid[0] < 1 << 31
        assert max(launch.grid[1:], default=1) <= 65535


@pytest.mark.kernels
@elementwise_ops
def test_every_layer_of_a_grid_has_its_columns(
    op: Callable[[Tensor, Tensor, str], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = tensors((2, 2 * 2048 + 5))
    expected = results_of(op, x, "triton")
    monkeypatch.setattr(module, "MOST_PROGRAMS", 2)
    elementwise_plan.cache_clear()
    try:
        assert elementwise_plan(4, *x.shape, x.stride(0)).grid == (2, 2, 2)
        got = results_of(op, x, "triton")
    finally:
        elementwise_plan.cache_clear()
    assert all(map(torch.equal, got, expected))
