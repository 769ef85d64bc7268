import copy

import pytest
import torch

from fuselayers.components import MLP, FusedMLP
from fuselayers.ops import ACTIVATIONS
from fuselayers.partition import saved_bytes
from tests.components.adapter import Adapter
from tests.components.compare import assert_same_step, randomise


@pytest.mark.parametrize(("activation", "bias"), [(None, False), *((name, True) for name in ACTIVATIONS)])
def test_it_is_two_linears_around_an_activation(activation: str | None, bias: bool) -> None:
    layer = randomise(MLP(7, expansion=2.0, activation=activation, bias=bias)).eval()
    x = torch.randn(3, 5, 7)
    hidden = x @ layer.up.weight.T + (layer.up.bias if bias else 0)
    hidden = hidden if activation is None else ACTIVATIONS[activation](hidden)
    expected = hidden @ layer.down.weight.T + (layer.down.bias if bias else 0)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("expansion", "width"), [(4.0, 28), (1.5, 10), (1 / 7, 1)])
def test_the_hidden_width_is_rounded_down(expansion: float, width: int) -> None:
    layer = MLP(7, expansion=expansion)
    assert (layer.up.out_features, layer.down.in_features) == (width, width)


def twins(*, backend: str = "auto", **options: object) -> tuple[MLP, FusedMLP]:
    plain = MLP(7, **options)  # type: ignore[arg-type]
    fused = FusedMLP(7, backend=backend, **options)  # type: ignore[arg-type]
    randomise(plain)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


@pytest.mark.parametrize(
    ("backend", "p", "bias"),
    [
        *(("auto", p, bias) for p in (0.0, 0.3) for bias in (True, False)),
        ("eager", 0.3, True),
        ("eager", 0.0, False),
    ],
)
def test_training_is_that_of_the_plain_mlp(backend: str, p: float, bias: bool) -> None:
    plain, fused = twins(backend=backend, dropout=p, bias=bias)
    assert_same_step(plain, fused, torch.randn(5, 3, 7))
    if backend == "auto":
        assert_same_step(plain, fused, torch.randn(9, 7))


def test_an_adapter_in_place_of_a_linear_is_called() -> None:
    plain, fused = twins()
    plain.up = Adapter(plain.up)  # type: ignore[assignment]
    fused.up = copy.deepcopy(plain.up)
    assert_same_step(plain, fused, torch.randn(4, 7))


def test_fused_it_keeps_no_mask_and_one_hidden_value_for_backward() -> None:
    # Backward needs x, the pre-activation and the input of the second matmul; torch also keeps a mask and activations.
    rows, hidden_dim = 32, 16
    layer = FusedMLP(hidden_dim, dropout=0.3, backend="eager")
    x = torch.randn(rows, hidden_dim, requires_grad=True)
    kept = saved_bytes(layer, x, parameters=tuple(layer.parameters()))
    assert kept <= 4 * rows * (hidden_dim + 2 * 4 * hidden_dim) + 64
