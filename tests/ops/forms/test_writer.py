import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops.forms.writer import Saving, Writer, apply, not_written, writer, writing


def written(
    function: Callable[..., Any], *tensors: Tensor, remade: Callable[[Saving], Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    wrote = Writer(tensors, remade)
    with writing(wrote):
        results = function(*tensors)
    replay = wrote.replay(results)
    assert wrote.why_not is None
    assert replay is not None
    return replay


def why_not(function: Callable[..., Any], *tensors: Tensor) -> str | None:
    wrote = Writer(tensors, lambda saving: lambda *tensors: saving.forward(*tensors)[0])
    with writing(wrote):
        results = function(*tensors)
    assert wrote.replay(results) is None
    assert not wrote._kept
    assert writer() is None
    return wrote.why_not


def text_of(replay: Callable[..., Any]) -> list[str]:
    return re.sub(r"\b([ct])[0-9]+", r"\1", str(replay.__doc__)).splitlines()


def double(x: Tensor, y: Tensor) -> None:
    """Stands for a launch."""
    y.copy_(2 * x)


def launched(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    wrote = writer()
    if wrote is None:
        double(x, y)
        return y
    wrote.launched(double, (x, y))
    return y


def check(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """Replay with other numbers, and return what is written."""
    replay = written(function, *(torch.randn(shape) for shape in shapes))
    tensors = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(replay(*tensors), function(*tensors))
    return text_of(replay)


def test_views_copies_sums_and_lists() -> None:
    def much(x: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
        both = torch.zeros(2, *x.shape, dtype=torch.float64)
        both[0].copy_(x)
        both[1] += launched(x.contiguous())
        first, second = both.sum((0, 1)).chunk(2)
        return both * weight, [first.to(torch.float32), torch.cat([second, first])]

    check(much, (4, 8), (8,))


def test_a_tensor_that_nothing_reads_is_not_made() -> None:
    def wasteful(x: Tensor) -> Tensor:
        torch.empty(3)
        torch.empty_like(x).view(-1)
        return launched(x)

    assert check(wasteful, (2, 4)) == [
        "def replay(a0):",
        "    t = c((2, 4), (4, 1), c)",
        "    c(a0, t)",
        "    return t",
    ]


def test_a_launch_gets_the_whole_where_a_view_begins_there() -> None:
    def rows(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        wrote = writer()
        if wrote is None:
            return 2 * x
        wrote.launched(lambda x, y: double(x.view(-1), y.view(-1)), (x.view(2, 12), y.view(-1)))
        return y

    assert check(rows, (2, 3, 4))[1:] == ["    t = c((2, 3, 4), (12, 4, 1), c)", "    c(a0, t)", "    return t"]


def test_a_launch_gets_the_view_where_it_begins_elsewhere() -> None:
    def second_half(x: Tensor) -> Tensor:
        return launched(x.chunk(2)[1])

    assert "t, t,  = c(a0, 2)" in check(second_half, (4, 3))[1]


outside = torch.ones(8)


def foreach(x: Tensor) -> Tensor:
    y = launched(x)
    torch._foreach_add_([y], 1.0)
    return y


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x + x.sum().item(), "aten._local_scalar_dense.default returns no tensors"),
        (lambda x: x + outside, "a tensor comes from elsewhere"),
        (lambda x: outside, "a tensor comes from elsewhere"),
        (foreach, "aten._foreach_add_.Scalar returns no tensors"),
        (lambda x: {"y": launched(x)}, "a dict may be another one in the next call"),
        (lambda x: torch.max(launched(x), 0), "a max may be another one in the next call"),
        (lambda x: [launched(x), object()], "a object may be another one in the next call"),
        (lambda x: not_written("no need") or launched(x), "no need"),
    ],
    ids=["item", "add", "return", "foreach", "dict", "named tuple", "object", "asked"],
)
def test_what_cannot_be_written_down(function: Callable[[Tensor], Any], said: str) -> None:
    assert why_not(function, torch.randn(8)) == said


def test_what_autograd_records_cannot_be_written_down() -> None:
    x = torch.randn(8, requires_grad=True)
    assert why_not(lambda x: x * 2, x) == "autograd records aten.mul.Tensor"
    with torch.no_grad():
        assert text_of(written(lambda x: x * 2, x))[1] == "    t = c(a0, 2)"


def test_a_view_of_what_it_got_stays_another_tensor() -> None:
    x = torch.randn(8)
    replay = written(lambda x: x.view_as(x), x)
    assert replay(x) is not x
    assert replay(x).data_ptr() == x.data_ptr()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, unused: Tensor, y: Tensor, shared: list[Tensor]) -> Tensor:
        product = x * y
        ctx.save_for_backward(y, product, None)
        ctx.factor = factor
        ctx.factor += 1
        return product * shared[0]

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        y, product, _ = ctx.saved_tensors
        assert product.shape == y.shape
        return None, dz * y * ctx.factor, None, dz if ctx.needs_input_grad[3] else None, None


def test_an_autograd_function() -> None:
    savings: list[Saving] = []

    def remade(saving: Saving) -> Callable[..., Any]:
        savings.append(saving)
        return lambda *tensors: saving.forward(*tensors)[0]

    def call(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        z: Tensor = apply(_Product, 2.0, x, y.neg(), y, [scale])
        return z

    x, y, scale = torch.randn(3, requires_grad=True), torch.randn(3), torch.randn(3)
    replay = written(call, x, y, scale, remade=remade)
    assert text_of(replay) == ["def replay(a0, a1, a2):", "    t = c(a1)", "    t = c(a0, a1, a2)", "    return t"]
    (saving,) = savings
    assert (saving.name, saving.places, saving.left) == ("_Product", [1, 3, None], {"factor": 3.0})
    result, saved = saving.forward(x.detach(), y, scale)
    torch.testing.assert_close(result, x.detach() * y * scale)
    torch.testing.assert_close(saved, (y, x.detach() * y, None))
    dx, dy, dscale = saving.backward(saved, (True, False, False), (torch.ones(3),))
    torch.testing.assert_close(dx, 3 * y)
    assert dy is dscale is None


def test_without_a_writer_it_is_applied() -> None:
    x = torch.randn(3, requires_grad=True)
    z = apply(_Product, 2.0, x, x, torch.ones(3), [torch.ones(3)])
    assert z.grad_fn.name() == "_ProductBackward"
    torch.testing.assert_close(torch.autograd.grad(z.sum(), [x])[0], torch.full((3,), 3.0))


class _Strange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, others: list[Tensor], do: str) -> Tensor:
        y = launched(x)
        if do == "mark":
            ctx.mark_non_differentiable(y)
        elif do == "hold":
            ctx.hold = [y]
        elif do == "call":
            ctx.call = lambda: y
        return y * others[0] if others else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("mark", "_Strange uses its context's mark_non_differentiable"),
        ("hold", "_Strange uses its context's hold"),
        ("call", "_Strange uses its context's call"),
    ],
)
def test_a_function_that_does_more_with_its_context(do: str, said: str) -> None:
    x = torch.randn(3, requires_grad=True)
    assert why_not(lambda x: apply(_Strange, x, [], do), x) == said


def test_a_function_that_reads_what_learns_and_is_no_argument() -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    said = "_Strange reads a tensor that learns, and is no argument"
    assert why_not(lambda x, weight: apply(_Strange, x, [weight], ""), x, weight) == said


def test_functions_one_after_the_other_and_within_another() -> None:
    def twice(x: Tensor) -> Tensor:
        z: Tensor = apply(_Strange, apply(_Strange, x, [], ""), [], "")
        return z

    x = torch.randn(3, requires_grad=True)
    replay = written(twice, x, remade=lambda saving: lambda *tensors: saving.forward(*tensors)[0])
    with torch.no_grad():
        torch.testing.assert_close(replay(x), 4 * x)

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y: Tensor = apply(_Strange, x, [], "")
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy

    assert why_not(lambda x: apply(Outer, x), x) == "_Strange is applied within another, or in a backward"
