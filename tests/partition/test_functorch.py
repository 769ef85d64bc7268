import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._dynamo.testing import EagerAndRecordGraphs

from fuselayers.partition import FallbackWarning, aot_function, aot_module, print_compile, ts_compile
from fuselayers.testing import results
from tests.partition.tracing import ops_of


def chain(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos().cos()


def check(fn: Callable[..., Any], traced: Callable[..., Any], *args: Tensor) -> None:
    """Assert that values and gradients are those of the plain function."""
    torch.testing.assert_close(results(traced, args), results(fn, args))


def grown() -> Tensor:
    return torch.randn(5, requires_grad=True)


def test_each_compiler_gets_its_graph_once() -> None:
    forward, backward = EagerAndRecordGraphs(), EagerAndRecordGraphs()
    traced = aot_function(chain, forward, backward)
    for _ in range(2):
        check(chain, traced, grown(), grown())
    assert [len(forward.graphs), len(backward.graphs)] == [1, 1]
    assert ops_of(forward.graphs[-1]) == ["add", "cos", "cos"]
    assert "sin" in ops_of(backward.graphs[-1])
    with torch.no_grad():
        check(chain, traced, grown(), grown())
    assert [len(forward.graphs), len(backward.graphs)] == [2, 1]


def test_the_error_of_a_compiler_is_raised() -> None:
    with pytest.raises(LookupError, match=r"^no such instruction$"):
        aot_function(chain, Mock(side_effect=LookupError("no such instruction")))(grown(), grown())


def test_decompositions_are_taken() -> None:
    plain, taken_apart = EagerAndRecordGraphs(), EagerAndRecordGraphs()
    table = get_decompositions([torch.ops.aten.silu])
    for compiler, decompositions in ((plain, None), (taken_apart, table)):
        traced = aot_function(nn.functional.silu, compiler, decompositions=decompositions)
        check(nn.functional.silu, traced, grown())
    assert "silu" in ops_of(plain.graphs[0])
    assert "silu" not in ops_of(taken_apart.graphs[0])


def test_inputs_are_written_to_as_in_eager() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * 2

    x, y = torch.zeros(3), torch.ones(3)
    out = aot_function(add, EagerAndRecordGraphs())(x, y)
    assert (x.tolist(), out.tolist()) == ([1.0] * 3, [2.0] * 3)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"fn": 3}, TypeError, "aot_function takes a function, got int"),
        (
            {"fw_compiler": "nnc"},
            TypeError,
            "fw_compiler must be a function of a graph and its inputs, got 'nnc'; to choose a backend",
        ),
        ({"bw_compiler": "nnc"}, TypeError, "bw_compiler must be a function of a graph and its inputs, got 'nnc'; "),
        ({"partition_fn": "mincut"}, ValueError, "no partitioner 'mincut'; did you mean 'min_cut'?"),
    ],
)
def test_what_does_not_fit_is_said(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    options: dict[str, Any] = {"fn": chain, "fw_compiler": EagerAndRecordGraphs(), **arguments}
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        aot_function(**options)


def test_a_traced_module_is_a_view() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    traced = aot_module(module, EagerAndRecordGraphs())
    assert list(traced.state_dict()) == list(module.state_dict())
    assert list(map(id, traced.parameters())) == list(map(id, module.parameters()))
    x = torch.randn(3, 4)
    for training in (True, False):
        traced.train(training)
        assert module.training is training
        gradients = []
        for model in (module, traced):
            torch.manual_seed(0)
            module.zero_grad()
            model(x).square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in module.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(*gradients)


def test_a_function_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"^aot_module takes a module, got function; aot_function is for functions$"):
        aot_module(chain, EagerAndRecordGraphs())  # type: ignore[arg-type]


def test_ts_compile_runs_the_graphs_and_says_what_replaces_it() -> None:
    with pytest.warns(FallbackWarning, match=r"^ts_compile: PyTorch no longer .*; write fuse\(fn, backend="):
        check(chain, aot_function(chain, ts_compile, static_argnums=(5,)), grown(), grown())


def test_print_compile_shows_both_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)
    out = aot_function(chain, print_compile)(a, b)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), a), torch.autograd.grad(chain(a, b).sum(), a))
    forward, backward = capsys.readouterr().out.strip().split("\n\n\n\n")
    assert "torch.ops.aten.cos.default" in forward
    assert "tangents_1" in backward
