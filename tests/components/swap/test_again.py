import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuselayers.components.swap.again import linear_again
from fuselayers.partition import saved_bytes


def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = ((2, 3, 5), (2, 3, 5), (4, 5), (4,))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def again(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear_again(product, (gate, up), weight, bias)


def test_values_and_gradients() -> None:
    gate, up, weight, bias = inputs()
    assert torch.equal(again(gate, up, weight, bias), F.linear(product(gate, up), weight, bias))
    assert torch.autograd.gradcheck(again, (gate, up, weight, bias))
    assert torch.autograd.gradcheck(lambda *some: again(*some, None), (gate, up, weight))


@pytest.mark.parametrize("frozen", range(4))
def test_what_needs_no_gradient_gets_none(frozen: int) -> None:
    tensors = inputs()
    tensors[frozen].requires_grad_(False)
    again(*tensors).sum().backward()
    assert [one.grad is None for one in tensors] == [index == frozen for index in range(4)]


def test_it_saves_the_sources_alone() -> None:
    gate, up, weight, bias = inputs(torch.float32)
    assert saved_bytes(again, gate, up, weight, bias, parameters=[weight, bias]) == 2 * 30 * 4


def test_under_autocast_gradients_have_the_dtypes_of_their_tensors() -> None:
    up, down, x = nn.Linear(8, 16), nn.Linear(16, 8), torch.randn(3, 8)
    results = []
    for form in (lambda z: linear_again(F.gelu, (z,), down.weight, down.bias), lambda z: down(F.gelu(z))):
        with torch.autocast("cpu", torch.bfloat16):
            y = form(up(x))
        up.zero_grad(), down.zero_grad()
        y.float().square().sum().backward()
        results.append([y, *(one.grad for one in (*up.parameters(), *down.parameters()))])
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def test_inside_a_transform() -> None:
    gate, up, weight, bias = (one.detach() for one in inputs())
    got = torch.func.grad(lambda one: again(one, up, weight, bias).sum())(gate)
    wanted = torch.func.grad(lambda one: F.linear(product(one, up), weight, bias).sum())(gate)
    assert torch.equal(got, wanted)
