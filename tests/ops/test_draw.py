from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuselayers import fuse, ops
from fuselayers.components import MLP
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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_seeds_survive_a_checkpoint_without_the_generators_state(use_reentrant: bool) -> None:
    layers = nn.Sequential(MLP(8, dropout=0.5), MLP(8, dropout=0.5))
    x = torch.randn(16, 8, requires_grad=True)
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}

    def gradient(*, checkpointed: bool, step: int = 1, **numbers: int) -> Tensor:
        with ops.seeds(layers, 7, step=step, **numbers):
            y = x
            for layer in layers:
                y = checkpoint(layer, y, **options) if checkpointed else layer(y)
            return torch.autograd.grad(y.sum(), x)[0] if not use_reentrant else _grad_of(y, x)

    state = torch.get_rng_state()
    expected = gradient(checkpointed=False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    torch.testing.assert_close(gradient(checkpointed=True), expected, rtol=0, atol=0)
    assert not torch.equal(gradient(checkpointed=False, step=2), expected)
    assert not torch.equal(gradient(checkpointed=False, micro_batch=1), expected)


def _grad_of(y: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_seeds_of_a_fused_model_follow_the_step() -> None:
    fused, x = fuse(MLP(8, dropout=0.5), backend="eager"), torch.ones(16, 8)

    def run(step: int) -> Tensor:
        with ops.seeds(fused, 7, step=step):
            y: Tensor = fused(x)
            return y

    first = run(1)
    torch.manual_seed(1)
    assert torch.equal(run(1), first)
    assert not torch.equal(run(2), first)


def test_seeds_inside_seeds() -> None:
    layer = nn.Dropout(0.5)
    text = "^ops.seeds is already active; exit it before you enter another$"
    with ops.seeds(layer, 7), pytest.raises(RuntimeError, match=text), ops.seeds(layer, 8):
        pass
