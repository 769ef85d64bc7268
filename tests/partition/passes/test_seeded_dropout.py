import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fuselayers.ops import draw_seed, dropout, keep_mask
from fuselayers.partition import fuse, saved_bytes
from fuselayers.partition.passes import replayed_dropout_pass, seeded_dropout_calls_pass, seeded_dropout_pass
from fuselayers.testing import results
from tests.partition.tracing import ops_of

P = 0.3


def native(x: Tensor, *, p: float = P, train: bool | None = True) -> tuple[Tensor, Tensor]:
    return torch.native_dropout(x, p, train)


def assert_same_from_seed_3(fns: Sequence[Any], run: Callable[[Any], Any], **tolerance: Any) -> None:
    """Assert that `run` returns the same for both functions."""
    results = []
    for fn in fns:
        torch.manual_seed(3)
        results.append(run(fn))
    torch.testing.assert_close(results[1], results[0], **tolerance)


def graph_of(fn: Callable[[Tensor], Any], x: Tensor, *, symbolic: bool = False) -> fx.GraphModule:
    return make_fx(lambda x: fn(x), tracing_mode="symbolic" if symbolic else "fake")(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_seeded_mask_is_the_dropout_of_this_library(dtype: torch.dtype, symbolic: bool) -> None:
    module = seeded_dropout_pass(graph_of(native, torch.randn(6, 10, dtype=dtype), symbolic=symbolic))
    assert "native_dropout" not in ops_of(module)
    # A graph with symbolic sizes takes another size too.
    for shape in ((6, 10), (7, 9)) if symbolic else ((6, 10),):
        x = torch.randn(shape, dtype=dtype)
        torch.manual_seed(5)
        out, mask = module(x)
        torch.manual_seed(5)
        seed = draw_seed()
        assert torch.equal(mask, keep_mask(seed, shape, p=P))
        assert torch.equal(out, dropout(x, P, seed=seed))
        assert out.dtype == dtype
        assert not torch.equal(module(x)[1], mask)


@pytest.mark.parametrize("make", [seeded_dropout_pass, replayed_dropout_pass])
@pytest.mark.parametrize(
    "fn",
    [partial(native, train=False), partial(native, p=0.0), partial(native, p=1.0)],
    ids=["eval", "p=0", "p=1"],
)
def test_what_drops_nothing_or_everything_is_left_alone(make: Any, fn: Any) -> None:
    module = graph_of(fn, torch.randn(6, 10))
    before = str(module.graph)
    assert str(make(module).graph) == before


class TestCalls:
    """The pass over Dynamo's graph, before Inductor."""

    def dynamo_graph(self, fn: Callable[[Tensor], Tensor]) -> fx.GraphModule:
        recorder = EagerAndRecordGraphs()
        torch.compile(fn, backend=recorder, fullgraph=True)(torch.randn(4, 6))
        return recorder.graphs[0]

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: F.dropout(x, P),
            lambda x: F.dropout(x, p=P, training=True),
            lambda x: F.dropout(x),
            lambda x: torch.dropout(x, P, True),
            lambda x: nn.Dropout(P)(x),
        ],
        ids=["F", "named", "bare", "torch", "module"],
    )
    def test_is_replaced(self, fn: Callable[[Tensor], Tensor]) -> None:
        module = seeded_dropout_calls_pass(self.dynamo_graph(fn))
        assert not [node for node in module.graph.nodes if node.target in (F.dropout, torch.dropout)]
        x, p = torch.randn(4, 6), 0.5 if fn(torch.ones(2000)).max() == 2 else P
        torch.manual_seed(1)
        (out,) = module(x)
        torch.manual_seed(1)
        assert torch.equal(out, dropout(x, p))

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: F.dropout(x, P, False),
            lambda x: F.dropout(x, 0.0),
            lambda x: F.dropout(x, 1.0),
            lambda x: F.dropout(x.clone(), P, inplace=True),
            lambda x: F.dropout1d(x, P),
        ],
        ids=["eval", "p=0", "p=1", "inplace", "channels"],
    )
    def test_is_left_alone(self, fn: Callable[[Tensor], Tensor]) -> None:
        module = self.dynamo_graph(fn)
        before = str(module.graph)
        assert str(seeded_dropout_calls_pass(module).graph) == before


ROWS, COLUMNS = 64, 128
MASK = ROWS * COLUMNS


def drops(x: Tensor) -> Tensor:
    return F.dropout(x * 1.0, P)


@pytest.fixture(scope="module", params=["eager", "inductor"])
def fused(request: pytest.FixtureRequest) -> Any:
    return fuse(drops, backend=request.param, fallback=(), fullgraph=True)


class TestThroughFuse:
    @pytest.mark.parametrize(
        ("backend", "p", "training"), [("eager", 0.5, False), ("eager", 0.0, True), ("inductor", 0.0, True)]
    )
    def test_dropout_in_place_that_drops_nothing_writes_nothing(self, backend: str, p: float, training: bool) -> None:
        """Autograd refuses a write to a tensor that it saved, here the result of exp."""
        fused = fuse(nn.Dropout(p, inplace=True).train(training), backend=backend, fallback=())
        x = torch.randn(8, requires_grad=True)
        y = x.exp()
        fused(y).sum().backward()
        torch.testing.assert_close(x.grad, y.detach())

    def test_no_mask_is_saved_and_backward_drops_what_forward_dropped(self, fused: Any) -> None:
        x = torch.ones(ROWS, COLUMNS, requires_grad=True)
        assert saved_bytes(drops, x) >= MASK
        assert saved_bytes(fused, x) == 8
        out = fused(x)
        assert 0.6 < (out != 0).float().mean() < 0.8
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], out.detach())

    @pytest.mark.parametrize(
        ("backend", "torch_random"),
        [
            ("eager", False),
            ("eager", True),
            pytest.param("inductor", False, marks=pytest.mark.slow),
            pytest.param("inductor", True, marks=pytest.mark.slow),
        ],
    )
    def test_without_gradients_the_masks_are_the_same(self, backend: str, torch_random: bool) -> None:
        fused = fuse(drops, backend=backend, torch_random=torch_random, fallback=())
        x = torch.ones(ROWS, COLUMNS, requires_grad=True)
        torch.manual_seed(2)
        expected = fused(x)
        torch.manual_seed(2)
        with torch.no_grad():
            assert torch.equal(fused(x), expected)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_under_checkpointing(self, fused: Any, use_reentrant: bool) -> None:
        """The recomputed forward has the masks of the first."""
        x = torch.ones(ROWS, COLUMNS, requires_grad=True)
        out = checkpoint(lambda x: fused(x).square(), x, use_reentrant=use_reentrant)
        out.sum().backward()
        torch.testing.assert_close(x.grad, 2 * out.detach())

    def test_a_checkpointed_region_inside(self, fused: Any) -> None:
        """It is a graph of its own, with the same mask, and it saves the seed, not the state of a generator."""
        x = torch.ones(ROWS, COLUMNS, requires_grad=True)
        fused(x)
        (backend,) = fused.served_by
        region = fuse(lambda x: checkpoint(drops, x, use_reentrant=False), backend=backend, fallback=())
        assert_same_from_seed_3((fused, region), lambda fn: results(fn, [x]))
        assert saved_bytes(region, x) == saved_bytes(fused, x) == 8


def unread(x: Tensor) -> Tensor:
    """It draws numbers that nothing reads."""
    torch.rand([])
    F.dropout(x, 0.5)
    torch.empty(3).normal_()
    return F.dropout(x, 0.5) * torch.rand(3)[0]


def after(drop_all: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """A layer that drops everything, draws nothing for it, and then drops some."""

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1.0
        return drop_all(y) + F.dropout(x, P), y

    return layer


LAYERS: dict[str, Callable[[Tensor], Any]] = {
    "two": lambda x: F.dropout(F.dropout(x * 1.0, P).exp(), 0.5),
    "permuted": lambda x: F.dropout(x.permute(0, 2, 1), 0.5),
    "rotated": lambda x: F.dropout(x.permute(2, 0, 1), 0.5),
    "strided": lambda x: F.dropout(x.permute(2, 1, 0)[1:, ::2], 0.5),
    "expanded": lambda x: F.dropout(x[:, :1].expand(-1, 5, -1), 0.5),
    "computed": lambda x: F.dropout((x.permute(0, 2, 1) * 2).sin(), 0.5),
    "unread": unread,
    "functional": after(lambda y: F.dropout(y, 1.0)),
    "in place": after(lambda y: F.dropout(y, 1, inplace=True)),
    "torch": after(lambda y: torch.dropout(y, 1.0, True)),
}


@pytest.mark.parametrize(("name", "backend"), [*((name, "eager") for name in LAYERS), ("two", "inductor")])
def test_torch_random_draws_the_numbers_of_plain_torch(name: str, backend: str) -> None:
    layer = LAYERS[name]
    fused = fuse(layer, backend=backend, torch_random=True, fallback=(), fullgraph=True, dynamic=False)
    x = torch.randn(4, 6, 10)
    x[0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])  # times 0 they are NaN

    def run(fn: Any) -> Any:
        trained = results(fn, [x])
        with torch.no_grad():
            return trained, fn(x), torch.get_rng_state()

    for _ in range(2):  # the first call compiles
        assert_same_from_seed_3((layer, fused), run, equal_nan=True)


def test_torch_random_draws_in_the_order_of_plain_torch() -> None:
    """Inductor fuses what reads the second mask with what comes before the first one."""

    def swapped(x: Tensor) -> tuple[Tensor, Tensor]:
        y = 4 * x
        z = y + y
        first = F.dropout(z, 0.3).sum(-1).tanh()
        return (first + first) @ F.dropout(y, 0.3), z

    x = torch.randn(2, 16, requires_grad=True)
    results = []
    for function in (swapped, fuse(swapped, backend="inductor", torch_random=True, fallback=())):
        torch.manual_seed(0)
        results.append(function(x))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.slow
def test_torch_random_draws_the_numbers_of_plain_torch_between_convolutions() -> None:
    convolutions = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(2)]
    model = nn.Sequential(convolutions[0], nn.AlphaDropout(P), convolutions[1])
    fused = fuse(model, backend="inductor", torch_random=True, fallback=())
    x_NCHW = torch.randn(2, 16, 8, 8)

    def run(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        y_NCHW: Tensor = model(x_NCHW)
        return y_NCHW

    torch.testing.assert_close(run(fused), run(model))


def test_dropout_in_place_keeps_no_mask_and_writes_to_its_input() -> None:
    def layer(x: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        dropped = F.dropout(hidden, 0.5, inplace=inplace)
        return dropped.sin(), hidden

    x = torch.randn(64, 64, requires_grad=True)
    fused = fuse(layer, backend="eager", fallback=())
    results = []
    for inplace in (False, True):
        torch.manual_seed(7)
        out, hidden = fused(x, inplace)
        (dx,) = torch.autograd.grad(out.sum(), x)
        results.append((out, hidden, dx))
    torch.testing.assert_close(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][2], results[0][2])
    kept = results[1][1]
    assert ((kept == 0) | (kept == 4 * x)).all()
    assert (kept == 0).any()
    in_place = fuse(lambda x: F.dropout(x.sin(), 0.5, inplace=True).cos(), backend="eager", fallback=())
    plain = fuse(lambda x: F.dropout(x.sin(), 0.5).cos(), backend="eager", fallback=())
    assert saved_bytes(in_place, x) == saved_bytes(plain, x)


def grouped(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:, :2], key[:, :2], None, 0.3, True, enable_gqa=True)


def broadcast(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:1], key[:1], dropout_p=0.3)


_LAYER = nn.MultiheadAttention(8, 2, dropout=0.3)


def multi_head(query: Tensor, key: Tensor, *, need_weights: bool = False) -> Tensor:
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    y: Tensor = _LAYER(query, key, key, need_weights=need_weights)[0]
    return y


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        (grouped, torch.float32),
        (grouped, torch.float64),
        pytest.param(broadcast, torch.float32, marks=pytest.mark.slow),
        (multi_head, torch.float32),
        pytest.param(partial(multi_head, need_weights=True), torch.float32, marks=pytest.mark.slow),
    ],
    ids=["grouped", "float64", "broadcast", "multi-head", "multi-head with weights"],
)
def test_attention_drops_with_the_same_mask_on_every_backend(attention: Any, dtype: torch.dtype) -> None:
    """In float64 and for shapes that broadcast no kernel runs, and torch's multi-head attention is one call."""
    query, key = torch.randn(2, 2, 4, 16, 8, dtype=dtype)
    fns = [fuse(attention, backend=backend, fallback=()) for backend in ("eager", "inductor")]
    assert_same_from_seed_3(fns, lambda fn: results(fn, [query, key]))
