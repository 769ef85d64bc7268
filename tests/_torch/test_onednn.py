"""torch's private op for oneDNN: these tests turn red when torch changes it."""

import pytest
import torch
from torch import Tensor

from fuselayers._torch.onednn import allows_onednn, has_fast_layout, has_onednn, onednn_product

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")

M, K, N = 33, 129, 65
BY_LAYOUT = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).t(),
    "part of wider rows": lambda m, n: torch.randn(m, 2 * n + 3)[:, 1 : n + 1],
    "every second column": lambda m, n: torch.randn(m, 2 * n)[:, ::2],
    "one row, repeated": lambda m, n: torch.randn(1, n).expand(m, n),
    "one column, repeated": lambda m, n: torch.randn(m, 1).expand(m, n),
    "one number": lambda m, n: torch.randn(()).expand(m, n),
    "not aligned": lambda m, n: torch.randn(m * n + 1)[1:].view(m, n),
}


@pytest.mark.parametrize("layout_of_b", BY_LAYOUT)
@pytest.mark.parametrize("layout_of_a", BY_LAYOUT)
def test_any_strides(layout_of_a: str, layout_of_b: str) -> None:
    a, b, bias = BY_LAYOUT[layout_of_a](M, K), BY_LAYOUT[layout_of_b](K, N), torch.randn(N)
    for added in (None, bias):
        y = onednn_product(a, b, added)
        truth = a.double() @ b.double() + (0 if added is None else added.double())
        assert y.is_contiguous()
        # Of float32's sums of 129 products; a wrong stride gives errors of the values' size.
        torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=1e-4)


def test_fast_layouts() -> None:
    fast = [name for name, layout in BY_LAYOUT.items() if has_fast_layout(layout(K, N))]
    assert fast == ["rows", "columns", "not aligned"]


def test_the_op_has_the_signature_that_is_called() -> None:
    arguments = "Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm"
    schema = torch.ops.mkldnn._linear_pointwise.default._schema
    assert str(schema) == f"mkldnn::_linear_pointwise({arguments}) -> Tensor Y"


def settings() -> list[tuple[str, bool]]:
    return [("highest", True), ("high", False), ("medium", False)]


@pytest.mark.parametrize(("precision", "allowed"), settings())
def test_float32_precision(precision: str, allowed: bool) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert allows_onednn() == allowed
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_settings_of_torch_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allows_onednn()
    for name, value in (("enabled", False), ("deterministic", True)):
        with monkeypatch.context() as changed:
            changed.setattr(torch.backends.mkldnn, name, value)
            assert not allows_onednn()
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        assert not allows_onednn()
    finally:
        matmul.fp32_precision = before
    assert allows_onednn()


def test_equal_from_run_to_run() -> None:
    a, b = torch.randn(512, 300), torch.randn(300, 200)
    results: list[Tensor] = [onednn_product(a, b, None) for _ in range(3)]
    assert all(torch.equal(results[0], result) for result in results)
