import warnings

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import RMSNorm
from tests.components.compare import assert_same_step, randomise


def test_it_is_torchs_with_torchs_keys() -> None:
    torchs = randomise(nn.RMSNorm(7, eps=0.01))
    ours = RMSNorm(7, eps=0.01)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict())
    assert_same_step(torchs, ours, torch.randn(3, 5, 7))


def test_a_bfloat16_input_with_a_float32_weight_keeps_its_dtype_and_warns_of_nothing() -> None:
    norm = randomise(RMSNorm(64))
    x = torch.randn(8, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = norm(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm(x), rtol=0.02, atol=0.02)


def test_error() -> None:
    with pytest.raises(ValueError, match=r"^hidden_dim must be at least 1, got -3$"):
        RMSNorm(-3)


@pytest.mark.parametrize("hidden_dim", [1, 7, 129])
def test_with_a_unit_offset_one_is_added_to_the_weight(hidden_dim: int) -> None:
    norm = randomise(RMSNorm(hidden_dim, eps=0.5, unit_offset=True)).double()

    class WrittenOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = norm.weight

        def forward(self, x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * (1 + self.weight)

    x = torch.randn(3, hidden_dim).double()
    assert_same_step(WrittenOut(), norm, x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.compile(norm, backend="aot_eager", fullgraph=True)(x), norm(x))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_with_a_unit_offset_it_is_transformers_gemma(values: torch.dtype, weights: torch.dtype) -> None:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    norm, theirs = RMSNorm(64, unit_offset=True).to(weights), gemma.Gemma3RMSNorm(64).to(weights)
    assert norm.weight.abs().max() == theirs.weight.abs().max() == 0
    with torch.no_grad():
        # Small differences from one, which a sum in bfloat16 would round away.
        norm.weight.normal_(std=0.003)
    theirs.load_state_dict(norm.state_dict())
    x = torch.randn(8, 64).to(values)
    # Once rounded to bfloat16, the same float32 may fall on either side.
    torch.testing.assert_close(norm(x), theirs(x), rtol=1e-5 if values == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("unit_offset", [True, False])
def test_the_scale_starts_again_at_one(unit_offset: bool) -> None:
    norm, x = randomise(RMSNorm(7, unit_offset=unit_offset)), torch.randn(3, 7)
    norm.reset_parameters()  # type: ignore[operator]
    assert norm.weight.tolist() == [0.0 if unit_offset else 1.0] * 7
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (7,), eps=1e-6))
    assert repr(norm) == f"RMSNorm(7, eps=1e-06, unit_offset={unit_offset})"
