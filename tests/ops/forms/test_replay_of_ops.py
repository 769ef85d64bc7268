import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.forms import replay as replay_module
from fuselayers.ops.forms import writer as writer_module
from fuselayers.ops.forms.replay import Replays, replayed
from tests.ops.cases import CASES, Case, all_cases, marks_of, one_of_each_every_day
from tests.ops.contract import DEVICE, seed_of, tensors
from tests.ops.forms.replay_toys import Watching

pytestmark = pytest.mark.kernels


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


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known, as at the start."""
    replays = [one for module in list(sys.modules.values()) for one in vars(module).values() if type(one) is Replays]
    assert replays
    for one in replays:
        monkeypatch.setattr(one, "_known", {})
        monkeypatch.setattr(one, "_came", {})


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, id=f"{layout}-{name}", marks=() if layout == "whole" else marks_of(name))
        for layout in ("whole", "rows apart", "transposed", "expanded gradients")
        for name, case in CASES.items()
    ],
)
def test_every_op_gives_the_same_bits_again(
    layout: str, case: Case, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What it makes is full of NaN, so that a line that is left out shows.
    monkeypatch.setattr(
        writer_module,
        "empty_strided_on",
        lambda kind: lambda *given: torch.empty_strided(*given[:2], dtype=given[2], device=DEVICE).fill_(torch.nan),
    )
    drawn = [tensors(*case.shapes((6, 40)), dtype=torch.bfloat16) for _ in range(4)]
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


@one_of_each_every_day
def test_little_stands_before_what_is_replayed(case: Case) -> None:
    """Time would depend on the machine. What is replayed is replaced by its results."""
    inputs = [_laid_out(one, "") for one in tensors(*case.shapes((6, 40)), dtype=torch.bfloat16)]
    for _ in range(4):
        _results(case, inputs)
    with replayed() as collected:
        _results(case, inputs)
    made = {id(replay): replay(*arguments) for replay, arguments in collected}
    works = [one for one in replay_module._replays if id(one.run) in made]
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


@all_cases
def test_no_op_keeps_what_it_wrote_down(case: Case, forgotten: None, what_a_test_makes: None) -> None:
    storages = []
    for _ in range(4):
        inputs = [_laid_out(one, "") for one in tensors(*case.shapes((6, 40)), dtype=torch.bfloat16)]
        results = _results(case, inputs)
        storages += [weakref.ref(one.untyped_storage()) for one in (*inputs, *results)]
        del inputs, results
    gc.collect()  # the interpreter leaves circles
    assert [one() for one in storages] == [None] * len(storages)


def test_gradients_of_an_op_in_batches(forgotten: None) -> None:
    for _ in range(4):
        x = torch.randn(6, 40, device=DEVICE, requires_grad=True)
        y = ops.softmax(x, backend="triton")
        incoming = torch.randn(3, 6, 40, device=DEVICE)
        one_by_one = [torch.autograd.grad(y, [x], dy, retain_graph=True)[0] for dy in incoming]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes one by one what it has no rule for
            (together,) = torch.autograd.grad(y, [x], incoming, is_grads_batched=True)
        torch.testing.assert_close(together, torch.stack(one_by_one))


def test_an_option_of_another_type_is_still_refused(forgotten: None) -> None:
    logits, target = torch.randn(6, 40, device=DEVICE), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    for _ in range(3):
        ops.cross_entropy(logits, target, ignore_index=-100, backend="triton")
    with pytest.raises(TypeError, match=r"^ignore_index must be an int, got float"):
        ops.cross_entropy(logits, target, ignore_index=-100.0, backend="triton")  # type: ignore[arg-type]


def test_a_mask_is_that_of_the_calls_own_seed() -> None:
    x = torch.randn(6, 40, device=DEVICE)
    masks = [ops.dropout(x, 0.5, seed=seed_of(number), backend="triton") == 0 for number in range(5)]
    for number, mask in enumerate(masks):
        assert torch.equal(mask, ops.dropout(x, 0.5, seed=seed_of(number), backend="eager") == 0)


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
