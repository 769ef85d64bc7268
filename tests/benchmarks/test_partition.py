import pytest
import torch
from torch import Tensor, nn

from benchmarks import partition as bench
from benchmarks.layers import LAYERS, LayerCase

CPU = torch.device("cpu")
UNIT = 4 * 128 * 256 * 4


class Sines(nn.Module):
    """y = sin sin (w x). Eager keeps x, w x and sin(w x); one of them is enough."""

    def __init__(self, hidden_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return (self.weight * x_BTD).sin().sin()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_unit_is_a_tensor_of_the_layers_size_and_parameters_do_not_count(dtype: torch.dtype) -> None:
    kept = bench.units(LayerCase(Sines, 1.0), dtype=dtype, device=CPU)
    assert kept["eager"] == 3.0
    if dtype == torch.float32:
        assert (kept["torch.compile"], kept["fuse"]) == (1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_keeps_more_than_its_target_and_rows_of_numbers_beside_it(name: str) -> None:
    kept = bench.units(LAYERS[name], dtype=torch.float32, device=CPU)
    # A number per token and head is 1/64 unit, a number per token 1/256, a rotary table 1/16. No whole tensor fits.
    assert kept["fuse"] <= LAYERS[name].target + 0.1
    assert kept["fuse"] < kept["torch.compile"] < kept["eager"]
    assert bench.matmuls_again(LAYERS[name], dtype=torch.float32, device=CPU) == 0
    if name == "GPT, SDPA":
        # By hand: x, q with k and v, attention's output, the sum after it, the MLP's hidden values. The small ones are
        # the logarithms of attention's sums, for 4 heads, and the seeds of two masks.
        assert kept["fuse"] * UNIT == (1 + 3 + 1 + 1 + 4) * UNIT + 4 * 4 * 128 * 4 + 2 * 8


@pytest.mark.slow
def test_budget_rows_are_torchs_and_ours_and_ours_is_never_above() -> None:
    rows = bench.budgets(num_layers=1)
    assert [row["torch's budget"] for row in rows] == sorted((row["torch's budget"] for row in rows), reverse=True)
    for row in rows:
        assert row["fuse FLOPs %"] <= row["torch FLOPs %"]
        assert row["fuse units"] <= row["torch units"] + 0.01
        assert row["lower"] in ("fuse", "same")
        assert row["lower"] == "fuse" or row["fuse FLOPs %"] == row["torch FLOPs %"]
    assert rows[-1]["torch FLOPs %"] > rows[0]["torch FLOPs %"]
    below = sum(row["lower"] == "fuse" for row in rows)
    assert bench.budget_note(rows) == f"No point of fuse lies above torch's curve; {below} of {len(rows)} lie below."
