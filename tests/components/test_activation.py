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


def test_what_each_gives() -> None:
    x = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0])
    expected = {
        "relu": [0, 0, 0, 1, 3],
        "leaky_relu": [-0.03, -0.01, 0, 1, 3],
        "gelu": [-0.00405, -0.158655, 0, 0.841345, 2.99595],
        "gelu_tanh": [-0.003637, -0.158808, 0, 0.841192, 2.996363],
        "silu": [-0.142278, -0.268941, 0, 0.731059, 2.857722],
        "squared_relu": [0, 0, 0, 1, 9],
        "star_relu": [-0.4472, -0.4472, -0.4472, 0.4472, 7.6024],
        "smelu": [0, 0.125, 0.5, 1.125, 3],
        "sigmoid": [0.047426, 0.268941, 0.5, 0.731059, 0.952574],
    }
    assert set(expected) == set(ACTIVATIONS)
    for name, values in expected.items():
        torch.testing.assert_close(
            create("activation", name)(x), torch.tensor(values, dtype=x.dtype), rtol=1e-4, atol=1e-5
        )
