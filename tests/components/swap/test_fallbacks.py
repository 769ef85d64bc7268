import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.swap import fallbacks, swap, unswap
from fuselayers.partition import FallbackWarning
from tests.components.adapter import Adapter
from tests.components.swap.layers import Feedforward


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


CHANGES = {
    replaced: r"up is a \S+\.Adapter",
    hooked: "down has a hook",
    patched: "the forward of up is replaced",
    of_another_class: r"up\.weight is a \S+\.Quantised",
    parametrized: r"up is a torch\.nn\.utils\.parametrize\.ParametrizedLinear",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_reason_is_given_once_and_kept(change: Any) -> None:
    model, x = nn.ModuleList([Feedforward(), Feedforward()]), torch.randn(3, 8)
    assert len(swap(model, level="layers", verify=False).sites) == 2
    model[0](x)
    assert fallbacks(model) == ()
    for module in model:
        change(module)
    with pytest.warns(FallbackWarning, match=f"Feedforward runs its original forward, .*: {CHANGES[change]}; see"):
        swapped = model[0](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[1](x)
    assert [(fallback.name, fallback.kind) for fallback in fallbacks(model)] == [
        ("0", "Feedforward"),
        ("1", "Feedforward"),
    ]
    for fallback in fallbacks(model):
        assert re.fullmatch(CHANGES[change], fallback.reason)
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


def test_a_layer_that_is_gone_raises_as_before() -> None:
    model, x = Feedforward(), torch.randn(3, 8)
    swap(model, level="layers", verify=False)
    del model.act
    with (
        pytest.warns(FallbackWarning, match="there is no act; see"),
        pytest.raises(AttributeError, match="no attribute 'act'"),
    ):
        model(x)
