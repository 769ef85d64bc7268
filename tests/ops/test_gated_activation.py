import pytest
import torch

from fuselayers.ops import gated_activation
from fuselayers.ops.gated_activation import gated_activation_reference
from tests.ops.contract import DTYPES, SHAPES, assert_as_good_as, check_fused, check_layouts, tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(shape, shape, dtype=dtype)
    assert_as_good_as(gated_activation, gated_activation_reference, inputs, activation="silu")


def test_layouts() -> None:
    check_layouts(gated_activation, gated_activation_reference, tensors((6, 9), (6, 9)), activation="gelu")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_fused(backend: str) -> None:
    inputs = tensors((6, 20), (6, 20))
    check_fused(gated_activation, gated_activation_reference, inputs, backend=backend, activation="silu")


def test_packed_gate_is_its_two_halves() -> None:
    packed = torch.randn(3, 10)
    assert torch.equal(gated_activation(packed), gated_activation(packed[:, :5], packed[:, 5:]))


def test_none_is_bilinear() -> None:
    gate, up = torch.randn(4), torch.randn(4)
    assert torch.equal(gated_activation(gate, up, activation=None), gate * up)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^a packed gate must have an even last dimension, got \[2, 3\]$"):
        gated_activation(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"^up must have x's shape \[2, 3\], got \[2, 4\]$"):
        gated_activation(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"^no activation 'sliu'; did you mean 'silu'\?"):
        gated_activation(torch.ones(2), activation="sliu")
