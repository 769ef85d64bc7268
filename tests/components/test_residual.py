"""Every residual style against its formula, and the contract of all styles."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.components import Choice, Residual, create, names
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise
from tests.components.registered import registered

D = 6
SEPARATE = {"separate_norms": True}
Formula = Callable[..., Tensor]


class Branches(nn.Module):
    def __init__(self, residual: Residual, number: int) -> None:
        super().__init__()
        self.residual = residual
        self.linear = nn.ModuleList(nn.Linear(D, D) for _ in range(number)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x, list(self.linear))


def made(kind: str, *, number: int = 2, **options: object) -> Residual:
    built_in = {name: options.pop(name) for name in ("layer", "num_layers", "dropout") if name in options}
    residual: Residual = create("residual", Choice(kind, options), D, num_sublayers=number, **built_in)
    return randomise(residual).double()


def assert_formula(kind: str, formula: Formula, **fixed: object) -> None:
    """Compare values and gradients with two and three sublayers, in training and in eval mode, with every option."""
    every = {"dropout": 0.3, "layer_scale": 0.5, "stochastic_depth": 0.5, "layer": 7, "num_layers": 8}
    for number in (2, 3):
        for options in ({"num_layers": 8}, {"num_layers": 8, "dropout": 0.3}, every):
            residual = made(kind, number=number, **options, **fixed)
            ours = Branches(residual, number)
            theirs = functools.partial(formula, residual, sublayers=ours.linear)
            x = torch.randn(4, 5, D, dtype=torch.float64)
            assert_same_step(theirs, ours, x, rtol=1e-7, atol=1e-7)
            torch.testing.assert_close(ours.eval()(x), theirs(x))


def drop(residual: Residual, y: Tensor) -> Tensor:
    return dropout(y, residual.dropout, training=residual.training)


def branch(residual: Residual, number: int, y: Tensor) -> Tensor:
    y = y * residual.scales[number] if residual.layer_scale else y
    if residual.training and residual.skipped:
        y = y * dropout(torch.ones(len(y), 1, dtype=y.dtype), residual.skipped)[:, None]
    return y


def norm(residual: Residual, number: int, x: Tensor) -> Tensor:
    layer = residual.norms[number]
    return F.layer_norm(x, (D,), layer.weight, layer.bias)


def pre(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    for i, sublayer in enumerate(sublayers):
        x = x + drop(residual, branch(residual, i, sublayer(norm(residual, i, x))))
    return x


def post(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    for i, sublayer in enumerate(sublayers):
        x = norm(residual, i, x + drop(residual, branch(residual, i, sublayer(x))))
    return x


def deepnorm(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    for i, sublayer in enumerate(sublayers):
        x = norm(residual, i, 2.0 * x + drop(residual, branch(residual, i, sublayer(x))))
    return x


def sandwich(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    for i, sublayer in enumerate(sublayers):
        y = drop(residual, sublayer(norm(residual, 2 * i, x)))
        x = x + branch(residual, i, norm(residual, 2 * i + 1, y))
    return x


def parallel(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    total = x
    for i, sublayer in enumerate(sublayers):
        normed = norm(residual, i if len(residual.norms) > 1 else 0, x)
        total = total + drop(residual, branch(residual, i, sublayer(normed)))
    return total


@pytest.mark.parametrize(
    ("formula", "needs_a_final_norm"),
    [(pre, True), (post, False), (deepnorm, False), (sandwich, True), (parallel, True)],
)
def test_every_style_matches_its_formula(formula: Formula, needs_a_final_norm: bool) -> None:
    assert made(formula.__name__).final_norm is needs_a_final_norm
    assert_formula(formula.__name__, formula)


def test_parallel_sublayers_may_have_norms_of_their_own() -> None:
    assert [len(made("parallel", number=number, **SEPARATE).norms) for number in (1, 2, 3)] == [1, 2, 3]
    assert_formula("parallel", parallel, **SEPARATE)


STYLES = names("residual")


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


@pytest.mark.parametrize("style", ["pre", Choice("parallel", SEPARATE)])
def test_a_norm_without_add_is_refused(style: Choice | str) -> None:
    text = r"^norm 'someones' must be a subclass of components\.Norm, which joins sums$"
    with registered("norm", someones=nn.LayerNorm), pytest.raises(TypeError, match=text):
        create("residual", style, D, norm="someones")
