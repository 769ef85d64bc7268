import pytest
import torch

from fuselayers.ops import ACTIVATIONS, gated_activation
from fuselayers.partition import fuse, saved_bytes
from tests.ops import truth
from tests.ops.contract import tensors


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_its_formula(activation: str) -> None:
    gate, up = tensors((3, 21), (3, 21), dtype=torch.float64)
    got = gated_activation(gate, up, activation=activation)
    torch.testing.assert_close(got, truth.activated(activation, gate) * up, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
def test_the_formula_saves_gate_and_up_and_what_the_activation_makes(activation: str | None) -> None:
    gate, up = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    kept = {None: 8, "relu": 8, "sigmoid": 8, "smelu": 17}.get(activation, 12)  # bytes for each element
    saved = saved_bytes(lambda gate, up: gated_activation(gate, up, activation=activation), gate, up)
    assert saved == kept * 64 * 128


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "smelu"])
def test_fused_backward_saves_gate_and_up(activation: str) -> None:
    gate, up = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    fused = fuse(lambda gate, up: gated_activation(gate, up, activation=activation), backend="inductor", fallback=())
    assert saved_bytes(fused, gate, up) == 2 * 32768


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^a packed gate must have an even last dimension, got \[2, 3\]$"):
        gated_activation(torch.ones(2, 3))
