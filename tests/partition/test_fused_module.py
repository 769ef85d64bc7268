from typing import Any

import torch
from torch import nn

from fuselayers.partition import FusedModule


class Doubling(nn.Linear):
    note = "kept"


def counted(module: nn.Module) -> tuple[FusedModule, list[Any]]:
    calls: list[Any] = []

    def call(*args: Any) -> Any:
        calls.append(args)
        return module(*args)

    return FusedModule(module, call), calls


def test_a_call_goes_through_the_fused_function() -> None:
    module = Doubling(3, 2)
    fused, calls = counted(module)
    x = torch.randn(1, 3)
    assert torch.equal(fused(x), module(x))
    assert len(calls) == 1


def test_a_parameter_replaced_on_one_side_is_replaced_on_the_other() -> None:
    module = Doubling(3, 2)
    fused, _ = counted(module)
    module.weight = nn.Parameter(torch.zeros(2, 3))
    assert fused.weight is module.weight
    fused.bias = nn.Parameter(torch.ones(2))
    assert module.bias is fused.bias
    fused.register_buffer("extra", torch.ones(1))
    assert "extra" in module.state_dict()


def test_an_option_set_on_the_view_reaches_the_module_that_runs() -> None:
    module = Doubling(3, 2)
    fused, _ = counted(module)
    fused.note = "changed"
    assert module.note == "changed"
    del fused.note
    assert module.note == "kept"
    hooked = []
    fused.register_full_backward_hook(lambda *args: hooked.append(1))
    fused(torch.randn(1, 3, requires_grad=True)).sum().backward()
    assert hooked == [1]


def test_mode_is_one_mode() -> None:
    module = Doubling(3, 2).eval()
    fused, _ = counted(module)
    assert not fused.training
    fused.train()
    assert module.training


def test_is_shown_as_what_it_is() -> None:
    fused, _ = counted(Doubling(3, 2))
    assert repr(fused) == "FusedModule(fused Doubling)"
    assert fused.note == "kept"
