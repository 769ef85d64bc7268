import copy
import functools
import gc
import inspect
import pickle
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from fuselayers import ops
from fuselayers.partition import (
    FallbackWarning,
    FusedFunction,
    FusedModule,
    PartitionError,
    budget,
    default_partition,
    eager_view,
    fuse,
    memory_efficient_fusion,
    min_cut,
    saved_bytes,
)
from fuselayers.testing import results
from tests.processes import run

# Compiling takes seconds, and `fuse` does the same around every backend.
either_backend = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])


def tutorial(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a + b + c + d).cos().cos()


def with_exponent(x: Tensor, exponent: Any, *, shift: float = 0.0) -> Tensor:
    return x.abs().pow(exponent).sin() + shift


@pytest.mark.parametrize(
    ("backend", "partition", "saved"),
    [
        ("eager", "default", 2),
        ("eager", "min_cut", 2),  # without fusion, recomputing a cosine takes a kernel, which costs more than saving it
        pytest.param("inductor", "default", 2, marks=pytest.mark.slow),
        ("inductor", "min_cut", 1),
    ],
)
def test_values_gradients_and_saved_tensors(backend: str, partition: str, saved: int) -> None:
    inputs = [torch.randn(16, 32, requires_grad=True) for _ in range(4)]
    fused = fuse(tutorial, backend=backend, partition=partition, fallback=())
    torch.testing.assert_close(results(fused, inputs), results(tutorial, inputs))
    assert fused.served_by == (backend,)
    assert saved_bytes(fused, *inputs) == saved * inputs[0].nbytes


def test_functorch_name_gives_each_static_value_a_graph() -> None:
    def norm(a: Tensor, b: Tensor, axis: int) -> Tensor:
        return nn.functional.layer_norm(a + b, (a.size(axis),))

    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    fused = memory_efficient_fusion(norm, static_argnums=(2,), backend="eager")
    for axis in (1, 0):
        torch.testing.assert_close(fused(a, b, axis), norm(a, b, axis))
    assert len(fused.report().graphs) == 2
    assert memory_efficient_fusion(backend="eager")(norm)(a, b, 1).shape == (4, 4)


# functorch's aot_function ignores each of these changes and reuses the graph of its first call.
class TestGuards:
    def test_shape_and_dtype(self) -> None:
        fused = fuse(tutorial, backend="eager")
        for shape in ((2, 3), (4, 3), (5, 7), (6,)):
            for dtype in (torch.float32, torch.float64):
                inputs = [torch.randn(shape, dtype=dtype) for _ in range(4)]
                torch.testing.assert_close(results(fused, inputs), results(tutorial, inputs))

    def test_python_value(self) -> None:
        fused = fuse(with_exponent, backend="eager")
        x = torch.rand(8)
        for exponent in (2, 3, 2.0, 0.5):
            torch.testing.assert_close(fused(x, exponent), with_exponent(x, exponent))

    @either_backend
    def test_a_number_of_a_partial_function_is_a_constant(self, backend: str) -> None:
        """torch has no gradient of a power whose exponent is a symbol."""

        def power(x: Tensor, n: int) -> Tensor:
            return x**n

        x = torch.rand(8, requires_grad=True)
        for exponent in (3, 2, 4):
            fused = fuse(functools.partial(power, n=exponent), backend=backend, fallback=(), fullgraph=True)
            (gradient,) = torch.autograd.grad(fused(x).sum(), x)
            torch.testing.assert_close(gradient, exponent * x.detach() ** (exponent - 1))
            assert str(fused.report()) == f"power(float32[8]) training: {backend}, as asked"

    def test_train_and_eval(self) -> None:
        layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        fused = fuse(layer, backend="eager")
        x = torch.randn(4, 8)
        for mode in (True, False, True):
            layer.train(mode)
            statistics = copy.deepcopy(layer.state_dict())
            expected = layer(x)
            layer.load_state_dict(statistics)
            torch.testing.assert_close(fused(x), expected)

    def test_more_values_than_dynamo_allows(self) -> None:
        fused = fuse(with_exponent, backend="eager", dynamic=False, fullgraph=True)
        x = torch.rand(8)
        for exponent in range(1, 19):
            torch.testing.assert_close(fused(x, exponent), with_exponent(x, exponent))
        assert len(fused.report().graphs) == 18

    @pytest.mark.parametrize(
        ("backend", "requires_grad"),
        [
            ("eager", True),
            pytest.param("inductor", False, marks=pytest.mark.slow),
            pytest.param("inductor", True, marks=pytest.mark.slow),
        ],
    )
    def test_a_number_that_changes(self, backend: str, requires_grad: bool) -> None:
        """The second start finds the first start's code in the caches of the process and of the disk."""
        for start in (0.0, 0.05):
            torch.compiler.reset()
            fused = fuse(lambda x, a: x.clamp(-a, a) * 2, backend=backend, fallback=())
            for number in (start + 0.1, start + 0.2, start + 0.3, start + 0.4):
                x = torch.full((2,), 5.0, requires_grad=requires_grad)
                torch.testing.assert_close(fused(x, number), torch.full((2,), 2 * number))

    @pytest.mark.parametrize("backend", ["eager", "auto"])  # "auto" begins with Inductor
    def test_a_view_that_stands_for_its_negative(self, backend: str) -> None:
        fused = fuse(lambda x: x * 2 + 1, backend=backend, fallback=("eager",))
        x = torch.tensor([2 + 2j, 1 - 4j]).conj().imag
        assert x.is_neg()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert torch.equal(fused(x), torch.tensor([-3.0, 9.0]))

    @either_backend
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_tangents(self, backend: str, requires_grad: bool) -> None:
        fused = fuse(tutorial, backend=backend, fallback=())
        inputs = [torch.randn(4, requires_grad=requires_grad) for _ in range(4)]
        fused(*inputs)
        tangents = []
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(inputs[0], torch.ones(4)), *inputs[1:]]
            for fn in (fused, tutorial):
                tangents.append(forward_ad.unpack_dual(fn(*duals)).tangent)
        torch.testing.assert_close(*tangents)

    def test_what_a_backend_cannot_trace_is_a_graph_break(self) -> None:
        def fn(a: Tensor, b: Tensor) -> Tensor:
            return F.silu(a @ b).sin()

        parts, b = [torch.randn(size, 4, requires_grad=True) for size in (2, 3)], torch.randn(4, 4, requires_grad=True)
        fused = fuse(fn, backend="eager", fallback=())
        fused(torch.nested.as_nested_tensor(parts, layout=torch.jagged), b).values().sum().backward()
        expected = torch.autograd.grad(sum(fn(part, b).sum() for part in parts), b)[0]
        torch.testing.assert_close(b.grad, expected)


class Block(nn.Module):
    """A small pre-norm feedforward block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = ops.bias_activation_dropout(
            F.linear(self.norm(x), self.up.weight), self.up.bias, activation="gelu", p=0.2, training=self.training
        )
        return ops.bias_dropout_residual(self.down(hidden), x, p=0.1, training=self.training) + self.shift


@either_backend
def test_a_module_trains_like_the_plain_one(backend: str) -> None:
    block = Block()
    fused = fuse(copy.deepcopy(block), backend=backend, fallback=())
    x = torch.randn(8, 16)
    losses: list[list[float]] = []
    for model in (block, fused):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


class TestTransparency:
    def test_inside_another_fuse(self) -> None:
        block = fuse(Block().eval(), backend="eager")
        whole = fuse(lambda x: block(x) + 1, backend="eager", fullgraph=True)
        x = torch.randn(2, 16)
        torch.testing.assert_close(whole(x), eager_view(block)(x) + 1)
        assert not block.report().graphs

    def test_twice(self) -> None:
        """The outer `fuse` serves the call with its options; the inner function keeps its options."""
        inner = fuse(tutorial, backend="eager", partition="default")
        inputs = [torch.randn(4, requires_grad=True) for _ in range(4)]
        inner(*inputs)
        fused = fuse(inner, backend="eager", fallback=())
        assert fused.fn is tutorial
        assert (fused.options.partition, inner.options.partition) == ("min_cut", "default")
        torch.testing.assert_close(results(fused, inputs), results(tutorial, inputs))
        assert str(inner.report()).endswith(" training, default: eager, as asked")
        assert str(fused.report()).endswith(" training: eager, as asked")


def test_dynamic_sizes_share_a_graph() -> None:
    fused = fuse(tutorial, backend="eager", dynamic=True)
    for size in (5, 9, 17, 33):
        inputs = [torch.randn(size, 4) for _ in range(4)]
        torch.testing.assert_close(results(fused, inputs), results(tutorial, inputs))
    assert len(fused.report().graphs) == 1


def test_a_number_that_changes_in_each_call_is_warned_of_once() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    fused = fuse(Counting(), backend="eager")
    with pytest.warns(UserWarning, match="Counting was compiled 8 times, since a size, a dtype") as caught:
        for number in range(1, 11):
            assert fused(torch.ones(2))[0] == number
    assert len([warning for warning in caught if "compiled" in str(warning.message)]) == 1

    def cut(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    def broken(x: Tensor) -> Tensor:
        x = cut(cut(cut(x.sin()).sin()).sin())
        x = cut(cut(cut(x.sin()).sin()).sin())
        return cut(cut(cut(x.sin()).sin()).sin())

    pieces = fuse(broken, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pieces(torch.ones(2))
    assert len(pieces.report().graphs) >= 8  # each is compiled once


def test_fullgraph_says_where_it_breaks() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    line = inspect.getsourcelines(breaks)[1] + 1
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        fuse(breaks, backend="eager", fullgraph=True)(torch.ones(2))
    assert re.search(rf'{re.escape(__file__)}", line {line}, in breaks', str(error.value)), str(error.value)
    assert torch.equal(fuse(breaks, backend="eager")(torch.ones(2)), torch.ones(2).sin())


@fuse(backend="eager", partition=budget(0.5), fallback=())
def decorated_with_options(x: Tensor, *, shift: float = 0.0) -> Tensor:
    """What it does."""
    return (x + shift).sin().exp().cos()


@fuse
def decorated(x: Tensor) -> Tensor:
    return x.sin()


def test_as_a_decorator() -> None:
    assert isinstance(decorated, FusedFunction)
    assert decorated.options.chain == ("auto", "inductor", "eager")
    assert decorated.__name__ == "decorated"
    assert repr(decorated) == "<fused function decorated>"
    assert repr(decorated.report()) == str(decorated.report()), "a notebook shows the text"
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert isinstance(decorated_with_options, FusedFunction)
    assert decorated_with_options.__doc__ == "What it does."
    assert decorated_with_options.options.chain == ("eager",)
    x = torch.randn(16, 16, requires_grad=True)
    torch.testing.assert_close(decorated_with_options(x, shift=1.0), (x + 1).sin().exp().cos())
    assert saved_bytes(decorated_with_options, x) <= 16 * 16 * 4 * 3 // 2
    assert decorated_with_options.served_by == ("eager",)


_SENDS = """
import pickle, sys, cloudpickle, torch
from fuselayers import fuse
two = 2
@fuse(backend="eager")
def double(x):
    return torch.mul(x, two)
class Scale:
    factor = 3.0
    @fuse(backend="eager")
    def times(self, x):
        return torch.mul(x, self.factor)
assert pickle.loads(pickle.dumps(double)) is double
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump((double, lambda x: double(x), Scale().times), file)
"""
_RECEIVES = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    double, calls_double, triple = pickle.load(file)
print(double, double(torch.ones(1)), calls_double(torch.ones(1)), triple(torch.ones(1)))
"""


def test_functions_of_a_script_reach_other_processes(tmp_path: Path) -> None:
    """cloudpickle and joblib send the code of functions of `__main__`, which the other process cannot import."""
    pytest.importorskip("cloudpickle")
    path = str(tmp_path / "sent")
    sent = run(_SENDS, path)
    assert sent.code == 0, sent.errors
    received = run(_RECEIVES, path)
    assert received.printed == "<fused function double> tensor([2.]) tensor([2.]) tensor([3.])\n", received.errors


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_has_the_options(clone: Any) -> None:
    fused = fuse(tutorial, backend="eager", partition=budget(0.5), fullgraph=True, torch_random=True, dynamic=False)
    inputs = [torch.randn(8, requires_grad=True) for _ in range(4)]
    fused(*inputs)
    twin = clone(fused)
    assert twin.options == fused.options
    assert twin.fn is tutorial
    assert twin.served_by == ()
    torch.testing.assert_close(twin(*inputs), tutorial(*inputs))
    module, x = clone(fuse(nn.Linear(8, 2), backend="eager", partition=budget(1.0), fallback=())), torch.randn(3, 8)
    torch.testing.assert_close(module(x), eager_view(module)(x))
    assert str(module.report()).endswith(" training, own partition: eager, as asked")


def own_cut(joint: Any, inputs: Any, **options: Any) -> Any:
    return min_cut(joint, inputs, **options)


def test_a_users_partitioner_is_wrapped_once_and_copied() -> None:
    fused, x = (
        fuse(torch.sin, backend="eager", partition=own_cut, compress="bfloat16"),
        torch.randn(8, requires_grad=True),
    )
    fused(x)
    assert fused.options.cut is fused.options.cut
    twin = pickle.loads(pickle.dumps(fused))
    assert twin.options == fused.options
    torch.testing.assert_close(twin(x), x.sin())


@pytest.mark.parametrize("backend", ["eager", "auto"])  # "auto" begins with Inductor
def test_a_budget_that_is_too_small(backend: str) -> None:
    """A graph that cannot be split as asked raises: another backend would get the same graph."""
    fused = fuse(tutorial, backend=backend, partition=budget(10))
    inputs = [torch.randn(64, requires_grad=True) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with pytest.raises(PartitionError, match=r"^this graph needs more than 10 bytes saved for backward: the"):
            fused(*inputs)
    assert fused.served_by == ()
    with pytest.raises(PartitionError):
        fused(*inputs)


async def waits(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"backend": "inducter"},
            ValueError,
            r"^no backend 'inducter'; did you mean 'inductor'\? there are: auto, eag",
        ),
        ({"backend": "cpp"}, ValueError, r"^no backend 'cpp'; there are: .*; an op takes it: ops\.dropout\(x, 0"),
        ({"partition": "mincut"}, ValueError, r"^no partitioner 'mincut'; did you mean 'min_cut'\? there are: .*defau"),
        ({"partition": 3}, TypeError, r"^partition must be a name or a callable, got int$"),
        ({"fallback": "eager"}, TypeError, r"^fallback must be a sequence of backends, got the string 'eager'; write"),
        ({"dynamic": "yes"}, TypeError, r"^dynamic must be None, True or False, got 'yes'$"),
        ({"backend": None}, TypeError, r"^backend must be a string, got None; leave it out for 'auto', or write 'eage"),
        ({"fallback": None}, TypeError, r"^fallback must be a sequence of backends, got None; write \(\) for none$"),
    ],
    ids=str,
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fuse(with_exponent, **options)


@pytest.mark.parametrize("door", [fuse, fuse(backend="eager")])
def test_what_comes_to_either_door(door: Any) -> None:
    with pytest.raises(TypeError, match=r"^fuse takes a function that returns tensors, got a coroutine function; fuse"):
        door(waits)
    with pytest.raises(TypeError, match=r"^fuse takes a function or a module, got int"):
        door(3)
    assert isinstance(door(nn.Linear(2, 2)), FusedModule)


@either_backend
def test_a_fused_function_is_freed(backend: str) -> None:
    """Dynamo keeps every backend and compiled graph, but must not keep the weights behind them."""
    module = nn.Linear(4, 4)
    fused = fuse(module, backend=backend)
    for _ in range(2):
        fused(torch.ones(2, 4)).sum().backward()
    weight, view, kind = weakref.ref(module.weight), weakref.ref(fused), weakref.ref(type(fused))
    del module, fused
    gc.collect()
    assert (weight(), view(), kind()) == (None, None, None)


def test_the_compiled_graphs_are_freed_with_the_function() -> None:
    graphs: list[weakref.ref[torch.fx.GraphModule]] = []

    def cut(*args: Any, **kwargs: Any) -> Any:
        forward, backward = default_partition(*args, **kwargs)
        graphs.extend((weakref.ref(forward), weakref.ref(backward)))
        return forward, backward

    @fuse(backend="eager", partition=cut, dynamic=False)
    def scaled(x: Tensor, *, scale: float) -> Tensor:
        return (x * scale).sin()

    for scale in (2.0, 3.0):
        scaled(torch.ones(3, requires_grad=True), scale=scale).sum().backward()
    assert len(graphs) == 4
    del scaled
    gc.collect()
    gc.collect()  # objects that the first collection freed held the graphs
    assert [graph() for graph in graphs] == [None] * 4


def test_a_module_checks_its_arguments_before_it_is_traced() -> None:
    class Doubled(nn.Module):
        def __call__(self, x: Tensor) -> Any:
            if not torch.compiler.is_compiling() and x.dim() != 1:
                raise ValueError("x must be [N]")
            return super().__call__(x)

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    fused = fuse(Doubled(), backend="eager")
    with pytest.raises(ValueError, match=r"^x must be \[N\]$"):
        fused(torch.ones(2, 2))
    assert not fused.report().graphs
    assert fused(torch.ones(1)).item() == 2
