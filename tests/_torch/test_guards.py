import inspect

import pytest
import torch

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
