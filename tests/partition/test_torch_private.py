import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers.partition import torch_private
from fuselayers.partition.compilers import why_inductor_is_unavailable


def test_every_name_is_there() -> None:
    for name in torch_private.__all__:
        assert getattr(torch_private, name) is not None, name


def test_without_a_limit_of_its_own_a_function_gets_one_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13 `torch.compile` has no such argument; the limit is then set around each call."""
    original = torch.compile
    limits = []

    def older(fn: object, *, backend: object, fullgraph: bool) -> object:
        return original(fn, backend=backend, fullgraph=fullgraph)

    def look(graph_module: torch.fx.GraphModule, example_inputs: object) -> object:
        limits.append(torch._dynamo.config.recompile_limit)
        return graph_module.forward

    monkeypatch.setattr(torch, "compile", older)
    assert "recompile_limit" not in inspect.signature(torch.compile).parameters
    compiled = torch_private.torch_compile(torch.sin, recompile_limit=33, backend=look, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())
    assert limits == [33]
    assert torch._dynamo.config.recompile_limit != 33


@pytest.mark.skipif(why_inductor_is_unavailable("cpu") is not None, reason="Inductor has no C++ compiler here")
def test_a_compiled_call_says_what_it_takes() -> None:
    def product(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y + row, row.exp()

    x, row = torch.randn(6, 5), torch.randn(5)
    takes, run = torch_private.compile_call(product, (x, x, row), ((0,), (0,), ()))
    for rows in (6, 2, 40):
        given = [torch.randn(rows, 5), torch.randn(rows, 5), row]
        assert takes(given)
        for got, expected in zip(run(list(given)), product(*given), strict=True):
            torch.testing.assert_close(got, expected)
    assert not takes([x, x[:4], row])  # a guard: both have as many rows
    assert not takes([x[:1], x[:1], row])  # another: more than one
    assert not takes([torch.randn(6, 7)] * 2 + [torch.randn(7)])  # no size that may change


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{func} was called under the caller's mode")


@pytest.mark.skipif(why_inductor_is_unavailable("cpu") is not None, reason="Inductor has no C++ compiler here")
def test_a_compiled_call_leaves_the_mode_of_its_caller() -> None:
    x = torch.randn(3, 4)
    with torch.inference_mode(), Refuses(), torch._inductor.config.patch(freezing=True):
        _, run = torch_private.compile_call(lambda x: (x.sin(),), (x,), ((),))
        assert torch.is_inference_mode_enabled()
    torch.testing.assert_close(run([x])[0], x.sin())
