"""What all residual styles do alike."""

import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import Choice, Residual, create, names, register, registry
from tests.components.compare import randomise
from tests.components.residual.written_out import D, made

STYLES = names("residual")
# Those whose stream is a plain sum, so that what a branch adds can be read off it.
ADDING = [name for name in STYLES if made(name).final_norm]
NORMS = ["layer_norm", Choice("rms_norm", {"eps": 0.0})]


@pytest.mark.parametrize("kind", STYLES)
def test_stochastic_depth_leaves_whole_sequences_out_and_grows_with_depth(kind: str) -> None:
    first, last = (made(kind, layer=layer, num_layers=4, stochastic_depth=0.8) for layer in (0, 3))
    assert (first.skipped, last.skipped) == (pytest.approx(0.2), pytest.approx(0.8))
    branches = [last.branch(0, lambda x: x, torch.ones(500, 3, D, dtype=torch.float64)) for _ in range(2)]
    kept = branches[0].flatten(1)
    assert ((kept == 0).all(1) | (kept == kept[:, :1]).all(1)).all()
    share = (kept[:, 0] != 0).double().mean().item()
    assert abs(share - 0.2) < 0.07
    torch.testing.assert_close(kept.max(), torch.tensor(5.0, dtype=torch.float64), rtol=1e-4, atol=0)
    assert not torch.equal(branches[0], branches[1])
    assert torch.equal(last.eval().branch(0, lambda x: x, branches[0]), branches[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_what_is_kept_is_rounded_once(dtype: torch.dtype) -> None:
    residual = made("pre", stochastic_depth=0.3)
    y = torch.randn(50, 7, D).to(dtype)
    branch = residual.branch(0, lambda x: x, y)
    assert branch.dtype == dtype
    kept = branch.flatten(1).any(1)
    assert 10 < kept.sum() < 50
    assert torch.equal(branch[kept], (y[kept].double() / 0.7).to(dtype))


def of_one_branch(kind: str, norm: Choice | str, **options: object) -> tuple[Residual, nn.Linear, Tensor]:
    residual = create("residual", Choice(kind, options), D, num_sublayers=1, norm=norm)
    return randomise(residual).double(), nn.Linear(D, D).double(), torch.randn(1, 3, D, dtype=torch.float64)  # type: ignore[return-value]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ADDING)
def test_the_mean_in_training_is_the_output_in_eval_mode(kind: str, norm: Choice | str) -> None:
    residual, sublayer, x = of_one_branch(kind, norm, stochastic_depth=0.75, layer_scale=0.3)
    added = residual.eval()(x, [sublayer]) - x
    in_training = residual.train()(x.expand(2000, -1, -1), [sublayer]) - x
    kept = (in_training != 0).flatten(1).any(1).double()
    torch.testing.assert_close(in_training, 4 * added * kept[:, None, None], rtol=1e-5, atol=1e-9)
    assert kept.mean().item() == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ADDING)
def test_what_a_branch_adds_grows_with_its_scale(kind: str, norm: Choice | str) -> None:
    residual, sublayer, x = of_one_branch(kind, norm, layer_scale=0.3)
    added = residual(x, [sublayer]) - x
    with torch.no_grad():
        residual.scales[0].mul_(3)
    torch.testing.assert_close(residual(x, [sublayer]) - x, 3 * added)


def test_layer_scale_starts_where_it_is_told_to_and_is_made_anew_on_demand() -> None:
    residual: Residual = create("residual", Choice("pre", {"layer_scale": 1e-5}), D)
    assert [scale.unique().tolist() for scale in residual.scales] == [[pytest.approx(1e-5)]] * 2
    with torch.device("meta"):
        empty: Residual = create("residual", Choice("pre", {"layer_scale": 1e-5}), D)
    empty.to_empty(device="cpu").reset_parameters()
    assert torch.equal(empty.scales[1], residual.scales[1])


@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer_scale": 0.0}, "layer_scale must be above 0, got 0.0"),
        ({"stochastic_depth": 1.0}, "stochastic_depth must be at least 0 and below 1, got 1.0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1, got -0.1"),
    ],
)
def test_errors(kind: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made(kind, **options)


def test_a_norm_that_cannot_join() -> None:
    register("norm", "someones")(nn.LayerNorm)
    try:
        with pytest.raises(
            TypeError, match=r"^norm 'someones' must be a subclass of components\.Norm, which joins sums$"
        ):
            create("residual", "pre", D, norm="someones")
    finally:
        del registry._OWNERS["norm"]["someones"]
