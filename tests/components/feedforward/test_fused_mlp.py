import copy

import pytest
import torch

from fuselayers.components import MLP, FusedMLP
from fuselayers.partition import saved_bytes
from tests.components.adapter import Adapter
from tests.components.compare import assert_same_step, randomise


def twins(hidden_dim: int = 7, *, backend: str = "auto", **options: object) -> tuple[MLP, FusedMLP]:
    plain = MLP(hidden_dim, **options)  # type: ignore[arg-type]
    fused = FusedMLP(hidden_dim, backend=backend, **options)  # type: ignore[arg-type]
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
