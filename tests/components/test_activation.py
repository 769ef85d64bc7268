import pytest
import torch

from fuselayers.components import create, get
from fuselayers.ops import ACTIVATIONS
from tests.components.compare import assert_same_step


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_activation_of_the_ops_is_a_module_of_its_name(name: str) -> None:
    module = create("activation", name)
    assert type(module) is get("activation", name)
    assert_same_step(ACTIVATIONS[name], module, torch.linspace(-5, 5, 129))
