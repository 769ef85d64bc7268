import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fuselayers.ops.forms.dispatch import define, needs_grad
from fuselayers.ops.forms.replay import Replays
from fuselayers.ops.forms.writer import apply
from tests.ops.forms.replay_toys import Watching, plus


class _Learned(torch.autograd.Function):
    """x * x + number + bias, whose backward launches a kernel too."""

    op: Any
    wanted: list[tuple[bool, ...]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, number: float) -> tuple[Tensor, Tensor]:
        y = _Learned.op(x * x, number)
        ctx.save_for_backward(x, None, y)
        ctx.factor = 2
        ctx.set_materialize_grads(False)
        return y if bias is None else y + bias, y.sum(-1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
        x, nothing, y = ctx.saved_tensors
        assert nothing is None
        assert y.shape == x.shape
        _Learned.wanted.append(ctx.needs_input_grad)
        wants_x, wants_bias = ctx.needs_input_grad[:2]
        dy = torch.zeros_like(x) if dy is None else dy
        whole = dy if dtotal is None else dy + dtotal[..., None]
        dx = ctx.factor * x * (whole if torch.is_grad_enabled() else _Learned.op(whole, 0.0))
        return dx if wants_x else None, dy.sum(0) if wants_bias else None, None


class Learning:
    """An op with gradients, its replays, and how often its forward and its backward were worked out."""

    def __init__(self) -> None:
        op = define("toy_plus(Tensor x, float number) -> Tensor", plus, lambda x, number: torch.empty_like(x))
        self.op = _Learned.op = op
        self.forwards = 0
        self.wanted = _Learned.wanted = []
        self.replays = Replays(self._call)

    def _call(self, x: Tensor, bias: Tensor | None, number: float) -> Any:
        self.forwards += 1
        if needs_grad(x, bias):
            return apply(_Learned, x, bias, number)[0]
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
        before = len(learning.wanted)

        def unpack(packed: Tensor) -> Tensor:
            return packed.mT.contiguous().mT if packed.dim() == 2 else packed

        for _ in range(3):
            x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda one: one, unpack):
                y = learning(x, bias)
            torch.testing.assert_close(torch.autograd.grad(y.sum(), [x]), (2 * x.detach(),))
        assert len(learning.wanted) == before + 1  # another layout, which is known then

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
        assert "fuselayers.toy_plus.default" in seen
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
        for times in range(1, 5):
            x = torch.randn(8, requires_grad=True)
            y = replays((x,))
            assert len(forwards) == times
            assert torch.equal(y, x + 0.5)
            assert torch.equal(torch.autograd.grad(y.sum(), [x])[0], torch.ones(8))

    def test_what_autograd_records_outside_of_a_function_is_worked_out(self, learning: Learning) -> None:
        replays = Replays(lambda x, bias: learning._call(x * 2, bias, 0.5))
        for _ in range(4):
            x = torch.randn(6, 8, requires_grad=True)
            (dx,) = torch.autograd.grad(replays((x, torch.zeros(8))).sum(), [x])
            torch.testing.assert_close(dx, 8 * x.detach())
        assert learning.forwards == 4

    def test_what_comes_back_is_freed_with_what_it_belongs_to(
        self, learning: Learning, what_a_test_makes: None
    ) -> None:
        gc.collect()
        gc.disable()
        try:
            for _ in range(4):
                x = torch.randn(6, 8, requires_grad=True)
                y = learning(x, torch.randn(8, requires_grad=True))
                storages = [weakref.ref(one.untyped_storage()) for one in (x, y, y.grad_fn.saved_tensors[-1])]  # type: ignore[attr-defined]
                y.sum().backward()
                del x, y
                assert [one() for one in storages] == [None] * 3
        finally:
            gc.enable()

    def test_gradients_in_batches(self, learning: Learning) -> None:
        weight = torch.randn(8, requires_grad=True)
        for _ in range(4):
            x = torch.randn(6, 8, requires_grad=True)
            y = learning(x, weight)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch takes one by one what it has no rule for
                (dx,) = torch.autograd.grad(y, [x], torch.ones(3, 6, 8), is_grads_batched=True)
            torch.testing.assert_close(dx, (2 * x.detach()).expand(3, 6, 8))
