import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.swap import fallbacks, swap, unswap
from fuselayers.partition import FallbackWarning
from tests.components.adapter import Adapter
from tests.components.swap.layers import LAYERS, Feedforward


def replaced(module: Any) -> None:
    module.up = Adapter(module.up)


def hooked(module: Any) -> None:
    module.down.register_forward_hook(lambda *_: None)


def patched(module: Any) -> None:
    module.up.forward = lambda x: torch.zeros(*x.shape[:-1], 16)


class Quantised(nn.Parameter):
    """A parameter of another class."""


def of_another_class(module: Any) -> None:
    module.up.weight = torch.Tensor._make_subclass(Quantised, module.up.weight.detach())


def parametrized(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.up)


def appended(module: Any) -> None:
    module.append(nn.Tanh())


def with_a_method(module: Any) -> None:
    module._norm = torch.zeros_like


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (Feedforward, replaced, r"up is a \S+\.Adapter"),
        (Feedforward, hooked, "down has a hook"),
        (Feedforward, patched, "the forward of up is replaced"),
        (Feedforward, of_another_class, r"up\.weight is a \S+\.Quantised"),
        (Feedforward, parametrized, r"up is a torch\.nn\.utils\.parametrize\.ParametrizedLinear"),
        (LAYERS["sequence"][0], appended, "its modules have changed"),
        (LAYERS["gemma"][0], with_a_method, "one of its methods is replaced"),
    ],
)
def test_the_reason_is_given_once_and_kept(make: Any, change: Any, reason: str) -> None:
    model, x = nn.ModuleList([make(), make()]).eval(), torch.randn(3, 8)
    kind = type(model[0]).__name__
    swap(model, level="layers", verify=False)
    model[0](x)
    assert fallbacks(model) == ()
    for module in model:
        change(module)
    with pytest.warns(FallbackWarning, match=f"{kind} runs its original forward, .*: {reason}; see"):
        swapped = model[0](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[1](x)
    assert [(fallback.name, fallback.kind) for fallback in fallbacks(model)] == [("0", kind), ("1", kind)]
    for fallback in fallbacks(model):
        assert re.fullmatch(reason, fallback.reason)
    unswap(model)
    assert fallbacks(model) == ()
    assert torch.equal(model[0](x), swapped)


def test_a_hook_of_all_modules() -> None:
    model, x = Feedforward(), torch.randn(3, 8)
    swap(model, level="layers", verify=False)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.warns(FallbackWarning, match="there is a hook of all modules; see"):
            model(x)
    finally:
        handle.remove()


def test_a_nested_tensor() -> None:
    model = Feedforward()
    x = torch.nested.nested_tensor([torch.randn(rows, 8) for rows in (3, 5)], layout=torch.jagged)
    wanted = model(x)
    swap(model, level="layers", verify=False)
    with pytest.warns(FallbackWarning, match="its input is a nested tensor; see"):
        torch.testing.assert_close(model(x).values(), wanted.values())


def test_a_layer_that_is_gone_raises_as_before() -> None:
    model, x = Feedforward(), torch.randn(3, 8)
    swap(model, level="layers", verify=False)
    del model.act
    with (
        pytest.warns(FallbackWarning, match="there is no act; see"),
        pytest.raises(AttributeError, match="no attribute 'act'"),
    ):
        model(x)
