import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fuselayers import ops
from fuselayers.ops.forms import alike, choice, served
from fuselayers.ops.forms.dispatch import run
from fuselayers.ops.forms.interpreter import INTERPRETED
from fuselayers.ops.forms.replay import Replays
from fuselayers.partition import warm_up

pytestmark = pytest.mark.skipif(INTERPRETED, reason="a CPU has kernels then")

WORTH_IT = (256, 256)


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    choice.forget_forms()
    yield
    choice.forget_forms()


@pytest.fixture
def compiled_is_faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "_decide", lambda *_: True)
    with warm_up(0):
        yield


class Op:
    """(x * number + y, x), which counts how often it is asked which form serves, and says which did.

    Args:
        after: what it makes of a form's results.
    """

    def __init__(self, after: Callable[[Any], Any] = lambda results: results) -> None:
        self.asked, self.by = 0, ""
        self.after = after
        self.call = Replays(self._call)

    def __call__(self, x: Tensor, y: Tensor | None = None, number: Any = 2.0) -> Any:
        return self.call((x, y), (number,))

    def _call(self, x: Tensor, y: Tensor | None, number: Any) -> Any:
        self.asked += 1
        if type(number) not in (int, float):
            raise TypeError(f"number must be a number, got {type(number).__name__}")
        return self.after(run("auto", self._formula, self._fused, (x, None, y), (number,)))

    def _formula(self, x: Tensor, nothing: None, y: Tensor | None, number: float) -> tuple[Tensor, Tensor]:
        assert nothing is None
        self.by = "formula"
        return x * number if y is None else x * number + y, x

    def _fused(self, x: Tensor, nothing: None, y: Tensor | None, number: float) -> tuple[Tensor, Tensor]:
        results = self._formula(x, nothing, y, number)
        self.by = "fused"
        return results


def test_a_call_asks_once_and_like_ones_are_served() -> None:
    op = Op()
    for _ in range(3):
        x, y = torch.randn(2, 2, 8).unbind()
        got, same = op(x, y)
        assert torch.equal(got, x * 2 + y)
        assert same is x
    assert op.asked == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: (x[:1], y),
        lambda x, y: (x, y[:1]),
        lambda x, y: (x.double(), y),
        lambda x, y: (x, y.double()),
        lambda x, y: (x.mT.contiguous().mT, y),
        lambda x, y: (x, y.clone().requires_grad_()),
        lambda x, y: (x, nn.Parameter(y)),
        lambda x, y: (x, None),
        lambda x, y: (x, y, 3.0),
        lambda x, y: (x, y, 2),
    ],
    ids=["shape", "shape 2", "dtype", "dtype 2", "layout", "grad", "class", "absent", "option", "kind of option"],
)
def test_another_kind_of_call_asks_again_and_both_are_known(other: Callable[..., Any]) -> None:
    op = Op()
    x, y = torch.randn(2, 2, 8).unbind()
    for _ in range(3):
        for given in ((x, y), other(x, y)):
            number = given[2] if len(given) > 2 else 2.0
            expected = given[0] * number
            assert torch.equal(op(*given)[0], expected if given[1] is None else expected + given[1])
    assert op.asked == 2


def test_one_tensor_in_two_places_is_not_taken_for_two() -> None:
    op = Op()
    x, y = torch.randn(2, 2, 8).unbind()
    for _ in range(2):
        assert torch.equal(op(x, x)[0], x * 3)
        assert torch.equal(op(x, y)[0], x * 2 + y)


def test_other_threads_are_another_question() -> None:
    op, x, threads = Op(), torch.randn(2, 8), torch.get_num_threads()
    op(x)
    torch.set_num_threads(threads + 1)
    try:
        op(x)
    finally:
        torch.set_num_threads(threads)
    assert op.asked == 2


def test_whether_gradients_are_recorded_is_another_question() -> None:
    op, x = Op(), torch.randn(2, 8, requires_grad=True)
    for _ in range(2):
        assert op(x)[0].requires_grad
        with torch.no_grad():
            assert not op(x)[0].requires_grad
    assert op.asked == 2


def test_what_is_not_asked_again_is_still_refused() -> None:
    op, x = Op(), torch.randn(2, 8)
    for _ in range(2):
        op(x, None, 1)
    with pytest.raises(TypeError, match=r"^number must be a number, got bool$"):
        op(x, None, True)
    with pytest.raises(TypeError, match=r"^number must be a number, got list$"):
        op(x, None, [1])


def test_what_is_equal_to_an_option_is_not_taken_for_it() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    for _ in range(2):
        ops.layer_norm(x, weight=weight, eps=numpy.float32(1))  # type: ignore[arg-type]
        ops.layer_norm(x, weight=weight, eps=1)
        for eps in (Fraction(1), 1 + 0j):
            with pytest.raises(TypeError):
                ops.layer_norm(x, weight=weight, eps=eps)  # type: ignore[arg-type]


def test_a_tensor_among_the_options_may_change() -> None:
    x, seed, training = torch.ones(64), torch.tensor(7), torch.tensor(True)
    for _ in range(2):
        assert 0 in ops.dropout(x, 0.5, training=training, seed=seed)  # type: ignore[arg-type]
    training.fill_(False)
    assert ops.dropout(x, 0.5, training=training, seed=seed) is x  # type: ignore[arg-type]


def test_what_autocast_casts_to_may_change() -> None:
    def call(x: Tensor) -> Tensor:
        y: Tensor = run("auto", Tensor.to, Tensor.to, (x,), (torch.get_autocast_dtype("cpu"),))
        return y

    replays, x = Replays(call), torch.ones(8)
    assert replays((x,)).dtype == torch.bfloat16
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert replays((x,)).dtype == dtype


@pytest.mark.parametrize("sparse", [lambda x: x.to_sparse_csr(), lambda x: x.to_sparse()])
def test_what_has_no_strides_gets_an_answer(sparse: Callable[[Tensor], Tensor]) -> None:
    """torch's guards end the process when they are asked about it."""

    def first(x: Tensor, y: Tensor) -> Tensor:
        return x + x

    asked, x = [], torch.eye(4)
    replays = Replays(lambda x, y: (asked.append(x), run("auto", first, first, (x, y)))[1])
    for _ in range(2):
        assert torch.equal(replays((sparse(x), x)).to_dense(), 2 * x)
        assert torch.equal(replays((x, sparse(x))), 2 * x)
    assert len(asked) == 4


def test_while_something_watches_nothing_is_kept() -> None:
    op, x = Op(), torch.ones(2, 8)
    with FlopCounterMode(display=False):
        op(x)
    torch.jit.trace(lambda x: op(x)[0], x, check_trace=False)
    assert op.call._served.known == {}


def test_one_of_a_forms_results() -> None:
    op, x = Op(lambda results: results[0]), torch.randn(2, 8)
    for _ in range(3):
        assert torch.equal(op(x), x * 2)
    assert op.asked == 1


@pytest.mark.parametrize(
    "op",
    [
        Op(lambda results: results[0] + 1),
        Op(lambda results: (results[0], results[1])),
        Op(lambda results: [results, choice.call_faster(torch.mul, torch.mul, results)][0]),
    ],
    ids=["something after it", "another tuple", "two forms"],
)
def test_what_does_more_than_call_its_form_always_asks(op: Op) -> None:
    x = torch.randn(2, 8)
    for _ in range(3):
        results = op(x, x.clone())
    assert op.asked == 3
    assert torch.equal(results if isinstance(results, Tensor) else results[0] + 1, x * 3 + 1)


def test_a_tensor_that_a_call_makes_is_made_each_time() -> None:
    def call(x: Tensor) -> Tensor:
        y: Tensor = run("auto", torch.mul, torch.mul, (x, torch.rand(()) + len(made)))
        made.append(y)
        return y

    made: list[Tensor] = []
    replays, x = Replays(call), torch.ones(8)
    for _ in range(3):
        replays((x,))
    assert [int(one[0]) for one in made] == [0, 1, 2]


def test_an_op_within_another() -> None:
    inner = Op()

    def call(x: Tensor) -> Tensor:
        first: Tensor = inner(x)[0]
        second: Tensor = run("auto", torch.mul, torch.mul, (x, x))
        return torch.stack((first, second))

    outer, x = Replays(call), torch.randn(2, 8)
    for _ in range(3):
        assert torch.equal(outer((x,)), torch.stack((x * 2, x * x)))
    assert inner.asked == 1


def test_after_an_error_calls_are_kept_as_before() -> None:
    fails = Replays(lambda x: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        fails((torch.ones(2),))
    assert served._here.came is None
    op = Op()
    for _ in range(2):
        op(torch.ones(2))
    assert op.asked == 1


@pytest.mark.usefixtures("compiled_is_faster")
def test_a_compiled_form_serves_only_where_it_may() -> None:
    op, x = Op(), torch.randn(WORTH_IT)

    def served_by(x: Tensor = x) -> str:
        op(x)
        return op.by

    assert [served_by() for _ in range(3)] == ["fused"] * 3
    assert op.asked == 1
    with warm_up(math.inf):
        assert served_by() == "formula"
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert served_by() == "formula"
    with FlopCounterMode(display=False):
        assert served_by() == "formula"
    torch.func.vmap(lambda row: (op(row), row)[1])(x)
    assert op.by == "formula"
    torch.func.vmap(lambda row: (served_by(), row)[1])(x)  # of x itself
    assert op.by == "formula"
    asked = op.asked
    assert served_by() == "fused"
    assert op.asked == asked


@pytest.mark.usefixtures("compiled_is_faster")
def test_what_is_forgotten_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = Op(), torch.randn(WORTH_IT)
    op(x)
    choice.forget_forms()
    monkeypatch.setattr(choice, "_decide", lambda *_: False)
    for _ in range(2):
        op(x)
    assert (op.asked, op.by) == (2, "formula")


def test_while_it_is_too_early_to_tell_every_call_asks() -> None:
    op, x = Op(), torch.randn(WORTH_IT)
    with warm_up(1000):
        for _ in range(3):
            op(x)
    assert op.asked == 3


def test_no_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "_MOST_KEYS", 4)
    monkeypatch.setattr(alike, "MOST_ALIKE", 3)
    op = Op()
    for rows in range(1, 9):
        op(torch.ones(rows, 2))
    assert [shape[0] for shape, *_ in op.call._served.known] == [5, 6, 7, 8]
    x = torch.ones(8, 2)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        op(x.to(dtype))
    assert sorted(map(len, op.call._served.known.values())) == [1, 1, 1, 3]
    assert op.asked == 11
    op(x.bfloat16())
    assert op.asked == 11
    op(x)
    assert op.asked == 12


def test_nothing_of_a_call_is_kept_alive() -> None:
    op, x, y = Op(), torch.randn(2, 8), torch.randn(2, 8)
    results = op(x, y)
    seen = [weakref.ref(one) for one in (x, y, results[0])]
    del x, y, results
    gc.collect()
    assert [one() for one in seen] == [None] * 3


def test_an_op_that_is_gone_is_no_longer_counted() -> None:
    gc.collect()
    before = len(served._all)
    op = Op()
    assert len(served._all) == before + 1
    del op
    gc.collect()
    assert len(served._all) == before


def test_threads_do_not_hear_each_other() -> None:
    op, outer = Op(), Op(lambda results: (thread(), results)[1])

    def thread() -> None:
        running = threading.Thread(target=lambda: op(torch.ones(4)))
        running.start()
        running.join()

    for _ in range(2):
        outer(torch.ones(2))
    assert (op.asked, outer.asked) == (1, 1)


def test_ops_are_served_with_the_numbers_they_had() -> None:
    torch.manual_seed(0)
    x, weight, target = torch.randn(4, 8), torch.randn(8), torch.tensor([1, -100, 0, 7])
    mask = torch.rand(4, 8) > 0.5
    calls: list[Callable[[], Any]] = [
        lambda: ops.layer_norm(x, weight=weight),
        lambda: ops.layer_norm(x, weight=weight, bias=weight + 1, eps=0.5),
        lambda: ops.rms_norm(x, weight=weight),
        lambda: ops.residual_layer_norm(x, x + 1, weight=weight),
        lambda: ops.residual_rms_norm(x, x + 1, weight=weight),
        lambda: ops.softmax(x, mask, causal=True, scale=0.5),
        lambda: ops.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.01),
        lambda: ops.gated_activation(x, activation="silu"),
        lambda: ops.rotary(x, x + 1, x[:, :4].cos(), x[:, :4].sin()),
        lambda: ops.dropout(x, 0.5),
        lambda: ops.bias_activation_dropout(x, weight, p=0.5),
        lambda: ops.bias_dropout_residual(x, x + 1, bias=weight, p=0.5),
        lambda: ops.bias_dropout_residual_layer_norm(x, x + 1, weight=weight, p=0.5),
        lambda: ops.bias_dropout_residual_rms_norm(x, x + 1, weight=weight, p=0.5, style="prenorm"),
        lambda: ops.bias_dropout_residual(x, x + 1, bias=weight, p=0.5, training=False),
    ]
    for call in calls:
        torch.manual_seed(0)
        first = call()
        before = {one: dict(one.known) for one in served._all}
        torch.manual_seed(0)
        torch.testing.assert_close(call(), first, rtol=0, atol=0)
        assert {one: dict(one.known) for one in served._all} == before  # so nothing was asked
        assert any(before.values())
        choice.forget_forms()


def test_what_is_wrong_is_refused_after_what_was_right() -> None:
    x, target = torch.ones(2, 8), torch.tensor([1, 2])
    for _ in range(2):
        ops.layer_norm(x, weight=torch.ones(8))
        ops.softmax(x)
        ops.cross_entropy(x, target)
        ops.gated_activation(x, x)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: ops.layer_norm(x, weight=torch.ones(7)), ValueError, "weight must be [8] to fit x"),
        (lambda: ops.layer_norm(x, weight=torch.ones(8).long()), TypeError, "weight must be a floating-point tensor"),
        (lambda: ops.layer_norm(x, weight=[1.0] * 8), TypeError, "weight must be a floating-point tensor, got list"),  # type: ignore[arg-type]
        (lambda: ops.layer_norm([1.0], weight=torch.ones(8)), TypeError, "x must be a floating-point tensor, got list"),  # type: ignore[arg-type]
        (lambda: ops.layer_norm(x, weight=torch.ones(8), backend="none"), ValueError, "no backend 'none'"),
        (lambda: ops.softmax(x, scale=[1.0]), TypeError, "scale must be a finite number, got list"),  # type: ignore[arg-type]
        (lambda: ops.cross_entropy(x, target.int()), TypeError, "target must hold class indices in int64"),
        (lambda: ops.cross_entropy(x, target + 8), IndexError, "Target 9 is out of bounds"),
        (lambda: ops.cross_entropy(x, target, z_loss=[0]), TypeError, "z_loss must be a number, got list"),  # type: ignore[arg-type]
        (lambda: ops.gated_activation(x, x.mT), ValueError, "up must have x's shape"),
        (lambda: ops.gated_activation(x[:, :7]), ValueError, "a packed gate must have an even last dimension"),
        (lambda: ops.gated_activation(x, x.to("meta")), ValueError, "up must be on x's device cpu, got meta"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind) as raised:
            call()
        assert str(raised.value).startswith(text)
