"""Compiled autograd: `torch._dynamo.config.compiled_autograd = True` compiles the backward of eager calls."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from tests.ops.cases import CASES, EVERY_DAY, Case
from tests.ops.contract import on_cpp, tensors

pytest.importorskip("transformers")

from fuselayers.components.swap import swap
from tests.components.swap.layers import LAYERS, inputs, layer
from tests.components.swap.levels import both_levels, pair
from tests.components.swap.models import batch_for, loss_of

OTHERS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rotary": (ops.rotary, [(2, 3, 5, 8), (2, 3, 5, 8), (5, 4), (5, 4)]),
    "softmax": (partial(ops.softmax, causal=True), [(2, 5, 5)]),
    "cross_entropy": (partial(ops.cross_entropy, target=torch.arange(5), z_loss=0.01), [(5, 33)]),
    "linear_cross_entropy": (
        lambda x, weight, **options: ops.linear_cross_entropy(x, weight, torch.arange(5), **options),
        [(5, 8), (33, 8)],
    ),
    "linear_log_prob": (lambda x, weight: ops.linear_log_prob(x, weight, torch.arange(5)), [(5, 8), (33, 8)]),
}


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


def gradients(loss_of: Callable[[], Tensor], leaves: list[Tensor], *, compiled: bool) -> list[Tensor | None]:
    """The gradients of a loss whose forward runs eagerly."""
    for leaf in leaves:
        leaf.grad = None
    forward = torch.compiler.disable(loss_of)

    def step() -> None:
        forward().backward()

    if compiled:
        with torch._dynamo.config.patch(compiled_autograd=True):
            before = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
            torch.compile(step, backend="aot_eager")()  # Inductor's wrong answers are those of AOTAutograd
            assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > before
    else:
        step()
    return [leaf.grad for leaf in leaves]


def check(loss_of: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    expected = gradients(loss_of, leaves, compiled=False)
    torch.testing.assert_close(gradients(loss_of, leaves, compiled=True), expected)


def sum_of(results: Any) -> Tensor:
    results = results if isinstance(results, tuple) else (results,)
    return torch.stack([(result * result.detach().cos()).sum() for result in results]).sum()


@pytest.mark.parametrize("backend", ["eager", on_cpp])
@pytest.mark.parametrize("case", [CASES[name] for name in EVERY_DAY], ids=EVERY_DAY)
def test_op(case: Case, backend: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in tensors(*case.shapes((6, 20)))]
    check(lambda: sum_of(case.op(*leaves, backend=backend, **case.options)), leaves)


@pytest.mark.parametrize("name", OTHERS)
def test_other_op(name: str) -> None:
    op, shapes = OTHERS[name]
    leaves = [tensor.requires_grad_() for tensor in tensors(*shapes)]
    check(lambda: sum_of(op(*leaves)), leaves)


@pytest.mark.parametrize("name", LAYERS)
def test_rule(name: str) -> None:
    module, arguments = layer(name), inputs(name)
    assert swap(module, level="layers", verify=False).sites

    def loss() -> Tensor:
        torch.manual_seed(0)  # the same masks
        return sum_of(module(*arguments))

    check(loss, [*module.parameters(), *arguments])


@both_levels
def test_model(level: str) -> None:
    plain, swapped = pair("llama", level)
    batch = batch_for("llama")
    expected = gradients(partial(loss_of, plain, batch), list(plain.parameters()), compiled=False)
    got = gradients(partial(loss_of, swapped, batch), list(swapped.parameters()), compiled=True)
    torch.testing.assert_close(got, expected)
