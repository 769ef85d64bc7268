from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F

from fuselayers import fuse
from fuselayers.ops import draw_seed, dropout, keep_mask


def test_a_draw_takes_one_number_from_the_generator() -> None:
    torch.manual_seed(0)
    expected = torch.randint(-(1 << 63), (1 << 63) - 1, (2,))
    torch.manual_seed(0)
    assert [draw_seed(), draw_seed()] == expected.tolist()


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "inductor"])
def test_plain_torch_compile_does_not_merge_two_draws(backend: str) -> None:
    def two_masks(x: torch.Tensor) -> torch.Tensor:
        first = keep_mask(draw_seed(device=x.device), x.shape, p=0.5)
        return (x * first * keep_mask(draw_seed(device=x.device), x.shape, p=0.5)).cos()

    x = torch.ones(16, 64, requires_grad=True)
    torch.manual_seed(1)
    expected = two_masks(x)
    torch.manual_seed(1)
    torch.testing.assert_close(torch.compile(two_masks, backend=backend)(x), expected)
    assert 0.15 < (expected != 1).double().mean() < 0.35  # two masks keep a quarter, one would keep a half


# Each takes seconds to compile.
@pytest.mark.parametrize(
    ("compiled", "grad"),
    [
        pytest.param(torch.compile, False, marks=pytest.mark.slow),
        pytest.param(torch.compile, True, marks=pytest.mark.slow),
        (fuse(backend="inductor"), False),
        pytest.param(fuse(backend="inductor"), True, marks=pytest.mark.slow),
        pytest.param(fuse(backend="inductor", torch_random=True), False, marks=pytest.mark.slow),
        pytest.param(fuse(backend="inductor", torch_random=True), True, marks=pytest.mark.slow),
    ],
)
def test_inductor_keeps_the_order_of_draws(compiled: Callable[..., Any], grad: bool) -> None:
    # To save memory, Inductor would embed and drop the second tokens before all else.
    def two_branches(
        first: torch.Tensor, second: torch.Tensor, table: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        read = dropout(F.embedding(first, table), 0.5)
        for _ in range(2):
            read = read + dropout(F.layer_norm(read, (64,)) @ weight, 0.5)
        written = dropout(F.embedding(second, table), 0.5)
        attended = F.scaled_dot_product_attention(written @ weight, read @ weight, read)
        return (written + dropout(attended, 0.5)).square().mean()

    first, second = torch.randint(0, 20, (2, 3, 7))
    table, weight = torch.randn(20, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    run = compiled(two_branches)
    # The key of torch's cache on disk does not include the lowering that keeps the order.
    with torch.set_grad_enabled(grad), inductor.patch(fx_graph_cache=False):
        torch.manual_seed(3)
        expected = two_branches(first, second, table, weight)
        torch.manual_seed(3)
        torch.testing.assert_close(run(first, second, table, weight), expected)


def test_torch_accepts_the_drawing_op() -> None:
    fresh = torch.empty((), dtype=torch.int64)
    tests = ("test_schema", "test_faketensor")  # the op has no gradient, and two draws differ
    torch.library.opcheck(
        torch.ops.fuselayers.draw_seed.default, (fresh,), {"device": torch.device("cpu")}, test_utils=tests
    )


# Each takes ten seconds to compile.
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [torch.compile, fuse(backend="inductor", fallback=())])
def test_dropout_under_the_wrapper_in_cpp(compiled: Callable[..., Any]) -> None:
    def two_masks(x: torch.Tensor) -> torch.Tensor:
        return dropout(dropout(x, 0.5).cos(), 0.3)

    x = torch.randn(4, 64, requires_grad=True)
    torch.manual_seed(3)
    expected = two_masks(x)
    with inductor.patch(cpp_wrapper=True):
        torch.manual_seed(3)
        got = compiled(two_masks)(x)
    torch.testing.assert_close(got, expected)
    incoming = torch.randn(4, 64)
    torch.testing.assert_close(torch.autograd.grad(got, x, incoming), torch.autograd.grad(expected, x, incoming))
