import gc
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fuselayers import ops
from fuselayers.ops.forms import dispatch as dispatch_module
from fuselayers.ops.forms import launch as launch_module
from fuselayers.ops.forms import replay as replay_module
from fuselayers.ops.forms.dispatch import define, needs_grad
from fuselayers.ops.forms.replay import Replays, replayed
from fuselayers.ops.forms.writer import apply, writer
from tests.ops.cases import CASES, Case
from tests.ops.contract import DEVICE, seed_of, tensors

on_kernels = pytest.mark.kernels


class Adding:
    """Stands for a Triton kernel, compiled or not: writes its first tensor and a number into its second."""

    def __init__(self) -> None:
        self.kinds: list[type] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Adding"]:
        def start(x: Tensor, y: Tensor, number: float, **options: Any) -> Adding:
            self.kinds.append(type(number))
            y.copy_(x.detach() + number)
            return self

        return start


adding = Adding()


def launch(x: Tensor, y: Tensor, number: float) -> None:
    launch_module.launch(adding, (1,), (x, y, number), ())


class Toy:
    """An op whose kernel is `start`, its replays, and how often its forward and its backward were worked out."""

    def __init__(self, run: Callable[..., Any], schema: str) -> None:
        self.forwards = self.backwards = 0
        self.op = define(schema, run, lambda x, *rest: torch.empty_like(x))

        def counted(*arguments: Any) -> Any:
            self.forwards += 1
            return self.op(*arguments)

        self.replays = Replays(counted)

    def call(self, *arguments: Any) -> Any:
        place = next((place for place, one in enumerate(arguments) if not isinstance(one, Tensor)), len(arguments))
        return self.replays(arguments[:place], arguments[place:])

    @property
    def written(self) -> list[str]:
        return [str(known.run.__doc__) for alike in self.replays._known.values() for known in alike]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("kernels"):
        yield
        return
    for module in (replay_module, dispatch_module):
        monkeypatch.setattr(module, "INTERPRETED", True)  # the CPU has kernels then,
    monkeypatch.setattr(launch_module, "INTERPRETED", False)  # which are compiled
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of "cpu"
    with torch.library._scoped_library("fuselayers", "FRAGMENT") as library:
        monkeypatch.setattr(dispatch_module, "_library", library)
        yield


def plus(x: Tensor, number: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    launch(rows, y.view(rows.shape), number)
    return y


@pytest.fixture
def toy(library: None) -> Toy:
    return Toy(plus, "toy_plus(Tensor x, float number) -> Tensor")


class TestWhatComesAgain:
    def test_what_came_twice_is_written_down_and_run_from_then_on(self, toy: Toy) -> None:
        for forwards in (1, 2, 2, 2):
            x = torch.randn(2, 3, 8)
            assert torch.equal(toy.call(x, 0.5), x + 0.5)
            assert toy.forwards == forwards
        (text,) = toy.written
        assert re.sub(r"\bc[0-9]+", "c", text).splitlines() == [
            "def replay(a0):",
            "    t1 = c((2, 3, 8), (24, 8, 1), c)",
            "    c(a0, t1, c)",
            "    return t1",
        ]

    def test_what_never_comes_again_is_not(self, toy: Toy) -> None:
        for rows in range(1, 20):
            toy.call(torch.ones(rows, 8), 0.5)
        assert toy.written == []

    @pytest.mark.parametrize(
        "other",
        [
            (lambda x: x.double(), 0.5),
            (lambda x: x[:, 1:], 0.5),
            (lambda x: x.mT.contiguous().mT, 0.5),
            (lambda x: torch.cat((x, x))[::2], 0.5),
            (lambda x: torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x), 0.5),
            (lambda x: x, 1.5),
        ],
        ids=["dtype", "shape", "layout", "rows", "address", "option"],
    )
    def test_another_kind_of_call_is_worked_out_anew(self, toy: Toy, other: tuple[Callable[..., Any], float]) -> None:
        x = torch.randn(6, 8)
        for _ in range(3):
            toy.call(x, 0.5)
        changed, number = other[0](x), other[1]
        assert torch.equal(toy.call(changed, number), changed + number)
        assert toy.forwards == 3

    def test_kinds_that_differ_in_little_are_all_known(self, toy: Toy) -> None:
        x = torch.randn(6, 8)
        for one in (x, x.double(), x.mT.contiguous().mT) * 3:
            assert torch.equal(toy.call(one, 0.5), one + 0.5)
        assert toy.forwards == 6
        assert len(toy.written) == 3

    def test_one_tensor_in_two_places_and_then_two(self, library: None) -> None:
        def difference(x: Tensor, y: Tensor) -> Tensor:
            result = torch.empty_like(x)
            launch(x, result, 0)
            return result.sub_(y)

        toy = Toy(difference, "toy_difference(Tensor x, Tensor y) -> Tensor")
        x, y = torch.randn(2, 4, 8).unbind()
        for _ in range(3):
            assert torch.equal(toy.call(x, y), x - y)
        assert toy.forwards == 2
        for _ in range(3):
            assert torch.equal(toy.call(x, x), x - x)
        assert toy.forwards == 5

    def test_a_tensor_that_is_not_there_and_then_is(self, library: None) -> None:
        def sum_of(x: Tensor, y: Tensor | None) -> Tensor:
            result = torch.empty_like(x)
            launch(x, result, 0)
            return result if y is None else result.add_(y)

        toy = Toy(sum_of, "toy_sum(Tensor x, Tensor? y) -> Tensor")
        toy.call = lambda *given: toy.replays(given)  # type: ignore[method-assign]
        x, y = torch.randn(2, 4, 8).unbind()
        for _ in range(3):
            assert torch.equal(toy.call(x, None), x)
            assert torch.equal(toy.call(x, y), x + y)
        assert toy.forwards == 4

    def test_whole_numbers_for_floats_become_floats(self, toy: Toy) -> None:
        adding.kinds.clear()
        for _ in range(4):
            toy.call(torch.zeros(8), 2)
        assert adding.kinds == [float] * 4

    @pytest.mark.parametrize(
        "obstacle", [lambda x: plus(x, x.sum().item()), lambda x: plus(x + outside, 0.0), lambda x: x + 1]
    )
    def test_what_cannot_be_written_down_is_worked_out(self, obstacle: Callable[[Tensor], Tensor]) -> None:
        toy = Toy(obstacle, "toy_hindered(Tensor x) -> Tensor")
        for _ in range(4):
            x = torch.randn(8)
            assert torch.equal(toy.call(x), obstacle(x))
        assert toy.forwards == 4

    def test_numbers_are_drawn_anew(self, library: None) -> None:
        toy = Toy(lambda x: plus(x + torch.rand(8), 0.0), "toy_noise(Tensor x) -> Tensor")
        for seed in range(4):
            torch.manual_seed(seed)
            expected = torch.rand(8)
            torch.manual_seed(seed)
            assert torch.equal(toy.call(torch.zeros(8)), expected)
        assert toy.forwards == 2

    def test_what_it_got_is_returned_itself(self, library: None) -> None:
        replays = Replays(lambda x, _: x)
        x = torch.ones(8, requires_grad=True)
        assert all(replays((x, None)) is x for _ in range(4))
        assert replays._known

    @pytest.mark.parametrize("option", [torch.ones(()), [1], {}], ids=["a tensor", "a list", "a dictionary"])
    def test_options_that_no_kind_can_be_made_of(self, option: Any) -> None:
        seen: list[Any] = []
        replays = Replays(lambda x, option: (seen.append(option), plus(x, 0.5))[1])
        for _ in range(4):
            assert torch.equal(replays((torch.zeros(8),), (option,)), torch.full((8,), 0.5))
        assert len(seen) == 4
        assert all(one is option for one in seen)

    def test_an_error_while_writing_is_the_callers(self, library: None) -> None:
        def refuse(x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

        toy = Toy(refuse, "toy_refuse(Tensor x) -> Tensor")
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"^out of memory$"):
                toy.call(torch.ones(8))
        assert writer() is None

    def test_old_ones_are_forgotten(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "_MOST_KINDS", 2)
        for rows in (1, 2, 3):
            x = torch.randn(rows, 8)
            for _ in range(3):
                assert torch.equal(toy.call(x, 0.5), x + 0.5)
        assert len(toy.written) == 1

    def test_what_is_never_known_again_is_written_down_a_few_times_at_most(
        self, toy: Toy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replay_module, "_fits", lambda tensors: lambda *given: False)
        for _ in range(20):
            assert torch.equal(toy.call(torch.zeros(8), 0.5), torch.full((8,), 0.5))
        assert toy.forwards == 20
        assert len(toy.written) == replay_module._MOST_ALIKE
        assert set(toy.replays._came.values()) == {replay_module._NEVER}

    def test_it_keeps_no_tensor(self, toy: Toy) -> None:
        x = torch.ones(8)
        for _ in range(2):
            result = weakref.ref(toy.call(x, 0.5).untyped_storage())
        given = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        assert given() is None
        assert result() is None

    def test_another_gpu_than_the_current_one_is_worked_out(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        current = [0]
        monkeypatch.setattr(replay_module, "current_device", lambda: current[0])
        monkeypatch.setattr(Tensor, "get_device", lambda self: 0)
        x = torch.randn(8)
        for current[0], forwards in ((0, 1), (0, 2), (0, 2), (1, 3), (0, 3)):
            assert torch.equal(toy.call(x, 0.5), x + 0.5)
            assert toy.forwards == forwards

    def test_amd_has_other_kernels_for_much_memory(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "ON_AMD", True)
        short = [True]
        monkeypatch.setattr(replay_module, "has_short_offsets", lambda tensor: short[0])
        for short[0], forwards in ((True, 1), (True, 2), (True, 2), (False, 3), (False, 3), (True, 3)):
            toy.call(torch.randn(8), 0.5)
            assert toy.forwards == forwards

    def test_what_is_replayed_can_be_collected_and_run_alone(self, toy: Toy) -> None:
        x = torch.randn(4, 8)
        for _ in range(2):
            toy.call(x, 0.5)
        with replayed() as collected:
            toy.call(x, 0.5)
        ((replay, arguments),) = collected
        assert torch.equal(replay(*arguments), x + 0.5)
        toy.call(x, 0.5)
        assert len(collected) == 1
        assert toy.forwards == 2


outside = torch.ones(())


class _Learned(torch.autograd.Function):
    """x * x + number + bias, whose backward launches a kernel too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, number: float, op: Any, counts: Any) -> tuple[Tensor, Tensor]:
        y = op(x * x, number)
        ctx.save_for_backward(x, None, y)
        ctx.more = op, counts
        ctx.set_materialize_grads(False)
        return y if bias is None else y + bias, y.sum(-1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
        x, nothing, y = ctx.saved_tensors
        assert nothing is None
        assert y.shape == x.shape
        op, counts = ctx.more
        counts.append(ctx.needs_input_grad)
        wants_x, wants_bias = ctx.needs_input_grad[:2]
        dy = torch.zeros_like(x) if dy is None else dy
        whole = dy if dtotal is None else dy + dtotal[..., None]
        dx = 2 * x * (whole if torch.is_grad_enabled() else op(whole, 0.0))
        return dx if wants_x else None, dy.sum(0) if wants_bias else None, None, None, None


class Learning:
    """An op with gradients, its replays, and how often its forward and its backward were worked out."""

    def __init__(self) -> None:
        self.op = define("toy_plus(Tensor x, float number) -> Tensor", plus, lambda x, number: torch.empty_like(x))
        self.forwards = 0
        self.wanted: list[tuple[bool, ...]] = []
        self.replays = Replays(self._call)

    def _call(self, x: Tensor, bias: Tensor | None, number: float) -> Any:
        self.forwards += 1
        if needs_grad(x, bias):
            return apply(_Learned, x, bias, number, self.op, self.wanted)[0]
        y = self.op(x * x, number)
        return y if bias is None else y + bias

    def __call__(self, x: Tensor, bias: Tensor | None = None, number: float = 0.5) -> Any:
        return self.replays((x, bias), (number,))

    def learn(self, times: int = 3) -> None:
        for _ in range(times):
            x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
            self(x, bias).sum().backward()


@pytest.fixture
def learning(library: None) -> Learning:
    return Learning()


def gradients_of(function: Callable[..., Tensor], x: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    leaves = [one for one in (x, bias) if one is not None and one.requires_grad]
    return list(torch.autograd.grad(function(x, bias), leaves, dy))


def plain(x: Tensor, bias: Tensor | None) -> Tensor:
    y = x * x + 0.5
    return y if bias is None else y + bias


class TestGradients:
    @pytest.mark.parametrize("kind", ["both", "x", "bias", "no bias"])
    def test_forward_and_backward_are_written_down(self, learning: Learning, kind: str) -> None:
        for times in range(1, 6):
            x = torch.randn(6, 8, requires_grad=kind != "bias")
            bias = None if kind == "no bias" else torch.randn(8, requires_grad=kind != "x")
            dy = torch.randn(6, 8)
            found = gradients_of(learning, x, bias, dy)
            torch.testing.assert_close(found, gradients_of(plain, x, bias, dy))
            # Of its own function backward is written down the first time; the first two functions are others.
            assert (learning.forwards, len(learning.wanted)) == (min(times, 2), min(times, 3))
        assert not set(learning.wanted[0]) - {True, False}
        assert len(set(learning.wanted)) == 1

    def test_without_gradients_it_is_another_kind(self, learning: Learning) -> None:
        learning.learn()
        x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8)
        for forwards in (3, 4, 4):
            with torch.no_grad():
                assert not learning(x, bias).requires_grad
            assert learning.forwards == forwards

    def test_gradients_that_lie_otherwise(self, learning: Learning) -> None:
        x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8)
        ways = [torch.randn(6, 8), torch.randn(8, 6).mT, torch.randn(8).expand(6, 8), torch.randn(6, 9)[:, 1:]]
        for dy in (*ways, *ways, *ways):
            torch.testing.assert_close(gradients_of(learning, x, bias, dy), gradients_of(plain, x, bias, dy))
        assert len(learning.wanted) == 2 + len(ways)

    def test_one_gradient_of_two(self, learning: Learning) -> None:
        learning.learn()
        x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        (dx,) = torch.autograd.grad(learning(x, bias).sum(), [x])
        (dbias,) = torch.autograd.grad(learning(x, bias).sum(), [bias])
        torch.testing.assert_close((dx, dbias), (2 * x, torch.full((8,), 6.0)))

    def test_backward_twice_and_once_too_often(self, learning: Learning) -> None:
        learning.learn()
        x = torch.randn(6, 8, requires_grad=True)
        y = learning(x, torch.randn(8, requires_grad=True)).sum()
        y.backward(retain_graph=True)
        y.backward()
        torch.testing.assert_close(x.grad, 4 * x.detach())
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()

    def test_a_second_derivative_is_worked_out(self, learning: Learning) -> None:
        learning.learn()
        x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        before = len(learning.wanted)
        (dx,) = torch.autograd.grad(learning(x, bias).sum(), [x], create_graph=True)
        (second,) = torch.autograd.grad(dx.square().sum(), [x])
        assert len(learning.wanted) == before + 1
        torch.testing.assert_close(second, 8 * x.detach())

    def test_what_is_saved_may_not_change(self, learning: Learning) -> None:
        learning.learn()
        x = torch.randn(6, 8, requires_grad=True)
        inner = x * 1
        y = learning(inner, torch.randn(8, requires_grad=True))
        inner.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints(self, learning: Learning, reentrant: bool) -> None:
        for _ in range(5):
            x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
            y = checkpoint(learning, x * 1, bias, use_reentrant=reentrant)
            found = torch.autograd.grad(y.sum(), [x, bias]) if not reentrant else None
            if found is None:
                y.sum().backward()
                found = x.grad, bias.grad
            torch.testing.assert_close(found, (2 * x.detach(), torch.full((8,), 6.0)))
        assert learning.forwards <= 4

    def test_saved_tensors_that_come_back_otherwise(self, learning: Learning) -> None:
        learning.learn()

        def unpack(packed: Tensor) -> Tensor:
            return packed.mT.contiguous().mT if packed.dim() == 2 else packed

        for _ in range(3):
            x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda one: one, unpack):
                y = learning(x, bias)
            torch.testing.assert_close(torch.autograd.grad(y.sum(), [x]), (2 * x.detach(),))

    def test_its_name_is_the_functions(self, learning: Learning) -> None:
        learning.learn()
        y = learning(torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True))
        assert learning.forwards == 2
        assert y.grad_fn.name() == "_LearnedBackward"

    def test_a_mode_in_backward_sees_it(self, learning: Learning) -> None:
        learning.learn()
        y = learning(torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True))
        with Watching() as watching:
            y.sum().backward()
        assert "fuselayers::toy_plus" in watching.seen

    def test_compiled_autograd_sees_it(self, learning: Learning) -> None:
        learning.learn()
        x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        y = learning(x, bias)
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())
        torch.testing.assert_close(bias.grad, torch.full((8,), 6.0))
        torch._dynamo.reset()

    def test_threads(self, learning: Learning) -> None:
        wrong: list[int] = []

        def train(number: int) -> None:
            for _ in range(30):
                x = torch.randn(6, 8 + number % 2, requires_grad=True)
                (dx,) = torch.autograd.grad(learning(x).sum(), [x])
                if not torch.allclose(dx, 2 * x):
                    wrong.append(number)

        threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert wrong == []

    def test_an_autograd_function_within_another_is_worked_out(self, library: None) -> None:
        class Outer(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y: Tensor = apply(Inner, x)
                return y

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                return dy

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return plus(x, 0.5)

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                return dy

        forwards: list[int] = []
        replays = Replays(lambda x: (forwards.append(1), apply(Outer, x))[1])
        for _ in range(4):
            x = torch.randn(8, requires_grad=True)
            y = replays((x,))
            assert torch.equal(y, x + 0.5)
            assert torch.equal(torch.autograd.grad(y.sum(), [x])[0], torch.ones(8))

    @pytest.mark.parametrize("more", ["a mark", "a tensor"])
    def test_a_function_that_does_more_with_its_context_is_worked_out(self, library: None, more: str) -> None:
        class Sorted(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
                y, mask = plus(x, 0.5), plus(x, 0.0)
                if more == "a mark":
                    ctx.mark_non_differentiable(mask)
                else:
                    ctx.shift = [mask]
                return y, mask

            @staticmethod
            def backward(ctx: Any, dy: Tensor, _: Tensor) -> Tensor:
                return dy

        replays = Replays(lambda x: apply(Sorted, x))
        for _ in range(4):
            y, mask = replays((torch.randn(8, requires_grad=True),))
            assert y.requires_grad
            assert mask.requires_grad is (more != "a mark")
        assert not replays._known

    def test_what_autograd_records_outside_of_a_function_is_worked_out(self, learning: Learning) -> None:
        replays = Replays(lambda x, bias: learning._call(x * 2, bias, 0.5))
        for _ in range(4):
            x = torch.randn(6, 8, requires_grad=True)
            (dx,) = torch.autograd.grad(replays((x, torch.zeros(8))).sum(), [x])
            torch.testing.assert_close(dx, 8 * x.detach())
        assert learning.forwards == 4


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **kwargs or {})


class TestWhatSeesTheCalls:
    def test_a_dispatch_mode(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with Watching() as watching:
            toy.call(torch.ones(8), 0.5)
        assert watching.seen[-1:] == ["fuselayers::toy_plus"]

    def test_a_trace_before_dispatch(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        traced = make_fx(lambda x: toy.call(x, 0.5), pre_dispatch=True)(torch.ones(8))
        assert "fuselayers.toy_plus" in traced.code
        assert torch.equal(traced(torch.zeros(8)), torch.full((8,), 0.5))

    def test_a_profiler(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with torch.profiler.profile() as profile:
            toy.call(torch.ones(8), 0.5)
        assert "fuselayers::toy_plus" in {event.name for event in profile.events()}

    def test_a_trace(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            traced = torch.jit.trace(lambda x: toy.call(x, 0.5), torch.ones(8))
        assert "fuselayers::toy_plus" in str(traced.graph)
        assert torch.equal(traced(torch.zeros(8)), torch.full((8,), 0.5))

    def test_a_compiler(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        whole = torch.compile(lambda x: toy.call(x, 0.5), backend=backend, fullgraph=True)
        assert torch.equal(whole(torch.ones(8)), torch.full((8,), 1.5))
        assert seen == ["fuselayers.toy_plus.default"]

    def test_a_transform(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        assert toy.forwards == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes one by one what it has no rule for
            out = torch.vmap(lambda x: toy.call(x, 0.5))(torch.ones(3, 8))
        assert torch.equal(out, torch.full((3, 8), 1.5))
        assert toy.forwards == 3

    def test_what_a_transform_left(self, toy: Toy) -> None:
        left: list[Tensor] = []
        torch.func.grad(lambda x: (left.append(x), x.sum())[1])(torch.ones(8))
        for _ in range(3):
            assert torch.equal(toy.call(left[0], 0.5), torch.full((8,), 1.5))
        assert toy.written == []

    def test_a_subclass(self, toy: Toy) -> None:
        class Mine(Tensor):
            pass

        for _ in range(3):
            out = toy.call(torch.ones(8).as_subclass(Mine), 0.5)
        assert type(out) is Mine
        assert toy.forwards == 3

    def test_numbers_that_stand_for_their_negatives(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8, 2)[:, 1], 0.5)
        x = torch.view_as_complex(torch.ones(8, 2)).conj().imag
        assert x.is_neg()
        for _ in range(3):
            assert torch.equal(toy.call(x, 0.5), torch.full((8,), -0.5))

    def test_inference_mode(self, toy: Toy) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(4):
                    x = torch.randn(4, 8)
                    out = toy.call(x, 0.5)
                    assert out.is_inference() is (mode is torch.inference_mode)
                    assert torch.equal(out, x + 0.5)
        assert len(toy.written) == 2

    def test_autocast(self, learning: Learning) -> None:
        def call(x: Tensor, weight: Tensor) -> Tensor:
            return learning.op(x @ weight, 0.5)

        replays = Replays(call)
        x, weight = torch.randn(4, 8), torch.randn(8, 8)
        for dtype in (torch.bfloat16, None) * 4:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                assert replays((x, weight)).dtype == (dtype or torch.float32)
        assert sum(map(len, replays._known.values())) == 2

    def test_a_cpu_without_kernels(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "INTERPRETED", False)
        for _ in range(4):
            toy.call(torch.ones(8), 0.5)
        assert toy.forwards == 4


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "rows apart" and x.dim() == 2:
        x = torch.cat((x, x), dim=1)[:, : x.shape[1]]
    elif layout == "transposed" and x.dim() == 2:
        x = x.mT.contiguous().mT
    return x.detach().requires_grad_(x.is_floating_point())


def _results(case: Case, inputs: list[Tensor], layout: str = "") -> list[Tensor]:
    out = case.op(*inputs, backend="triton", **case.options)
    outs = [one for one in (out if isinstance(out, tuple) else (out,)) if one.requires_grad]
    torch.manual_seed(1)
    incoming = [torch.randn(one.shape, dtype=one.dtype, device=DEVICE) for one in outs]
    if layout == "expanded gradients":
        incoming = [one.flatten()[0].expand(one.shape) for one in incoming]
    leaves = [one for one in inputs if one.requires_grad]
    gradients = torch.autograd.grad(outs, leaves, incoming, allow_unused=True)
    return [one.clone() for one in (*outs, *gradients) if one is not None]


@on_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", ["whole", "rows apart", "transposed", "expanded gradients"])
def test_every_op_gives_the_same_bits_again(case: Case, layout: str) -> None:
    drawn = [tensors(*case.shapes((6, 40)), dtype=torch.bfloat16) for _ in range(5)]
    again = [_results(case, [_laid_out(one, layout) for one in inputs], layout) for inputs in drawn]
    with replayed() as collected:
        _results(case, [_laid_out(one, layout) for one in drawn[-1]], layout)
    assert len(collected) == 2  # forward and backward
    with Watching():
        worked_out = [_results(case, [_laid_out(one, layout) for one in inputs], layout) for inputs in drawn]
    for mine, theirs in zip(again, worked_out, strict=True):
        assert all(map(torch.equal, mine, theirs))


class _Bare(torch.autograd.Function):
    """The least that an op with gradients could be."""

    @staticmethod
    def forward(ctx: Any, results: Callable[[], Any], *leaves: Tensor) -> Any:
        ctx.save_for_backward(*leaves)
        return results()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        return None, *ctx.saved_tensors


def _number_of_calls(function: Callable[[], Any]) -> tuple[int, Any]:
    """Of Python's functions and of C's."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return calls, result


@on_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_little_stands_before_what_is_replayed(case: Case) -> None:
    """Time would depend on the machine. What is replayed is replaced by its results."""
    inputs = [_laid_out(one, "") for one in tensors(*case.shapes((6, 40)), dtype=torch.bfloat16)]
    for _ in range(4):
        _results(case, inputs)
    with replayed() as collected:
        _results(case, inputs)
    made = {id(replay): replay(*arguments) for replay, arguments in collected}
    works = [one for one in replay_module._works if id(one.run) in made]
    assert len(works) == 2

    def backward(out: Any) -> Callable[[], None]:
        outs = out if isinstance(out, tuple) else (out,)
        incoming = [torch.ones_like(one) for one in outs]
        return lambda: torch.autograd.backward(outs, incoming)

    def standing_in(results: Any) -> Callable[..., Any]:
        return lambda *arguments: results

    before = [one.run for one in works]
    for one, run in zip(works, before, strict=True):
        one.run = standing_in(made[id(run)])
    try:
        forward_calls, out = _number_of_calls(lambda: case.op(*inputs, backend="triton", **case.options))
        backward_calls, _ = _number_of_calls(backward(out))
    finally:
        for one, run in zip(works, before, strict=True):
            one.run = run
    results = out.detach() if isinstance(out, Tensor) else tuple(one.detach() for one in out)
    leaves = [one for one in inputs if one.requires_grad]
    bare_forward_calls, out = _number_of_calls(lambda: _Bare.apply(lambda: results, *leaves))
    bare_backward_calls, _ = _number_of_calls(backward(out))
    assert forward_calls - bare_forward_calls <= 24
    assert backward_calls - bare_backward_calls <= 24


@on_kernels
def test_a_mask_is_that_of_the_calls_own_seed() -> None:
    x = torch.randn(6, 40, device=DEVICE)
    masks = [ops.dropout(x, 0.5, seed=seed_of(number), backend="triton") == 0 for number in range(5)]
    for number, mask in enumerate(masks):
        assert torch.equal(mask, ops.dropout(x, 0.5, seed=seed_of(number), backend="eager") == 0)


@on_kernels
@pytest.mark.parametrize("learns", [False, True])
def test_seeds_are_drawn_as_by_the_formula(learns: bool) -> None:
    x = torch.ones(6, 40, device=DEVICE, requires_grad=learns)
    for backend in ("triton", "eager"):
        torch.manual_seed(3)
        drawn = [ops.dropout(x, 0.5, backend=backend) == 0 for _ in range(5)]
        drawn.append(torch.rand(40, device=DEVICE) < 0.5)
        if backend == "triton":
            by_kernels = drawn
    assert all(map(torch.equal, by_kernels, drawn))
    assert not torch.equal(drawn[3], drawn[4])
