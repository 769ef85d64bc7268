import pytest
import torch
from torch import nn

from fuselayers.components.plain_linear import is_plain_linear


def with_a_hook(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda *_: None)


def with_a_hook_before(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda *_: None)


def with_a_hook_on_the_gradient(layer: nn.Linear) -> None:
    layer.register_full_backward_hook(lambda *_: None)


def with_another_forward(layer: nn.Linear) -> None:
    layer.forward = lambda x: x  # type: ignore[method-assign]


def with_a_parametrisation(layer: nn.Linear) -> None:
    nn.utils.parametrizations.weight_norm(layer)


@pytest.mark.parametrize(
    "change",
    [with_a_hook, with_a_hook_before, with_a_hook_on_the_gradient, with_another_forward, with_a_parametrisation],
)
def test_a_layer_that_does_more_is_called(change: object) -> None:
    layer = nn.Linear(2, 3)
    assert is_plain_linear(layer)
    change(layer)  # type: ignore[operator]
    assert not is_plain_linear(layer)


def test_an_adapter_in_its_place_is_called() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    assert not is_plain_linear(Adapted(2, 3))
    assert not is_plain_linear(nn.Sequential(nn.Linear(2, 3)))
