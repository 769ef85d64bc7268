import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers._torch import guards


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
    compiled = guards.torch_compile(torch.sin, recompile_limit=33, backend=look, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())
    assert limits == [33]
    assert torch._dynamo.config.recompile_limit != 33


def test_a_freed_function_leaves_another_one_of_its_line_compiled() -> None:
    """Their code object is one. Had they not copies of it, the first's end would crash the second's compilation."""
    graphs = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph_module)
        return graph_module.forward

    def of_one_line(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return guards.torch_compile(lambda x: fn(x), recompile_limit=8, backend=backend, fullgraph=True)

    first, second = of_one_line(torch.cos), of_one_line(torch.sin)
    first(torch.ones(2)), second(torch.ones(2))
    del first
    gc.collect()
    assert torch.equal(second(torch.ones(2)), torch.ones(2).sin())
    assert len(graphs) == 2
