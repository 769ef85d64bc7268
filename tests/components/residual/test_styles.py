"""Every residual style against its formula."""

import pytest
from torch import Tensor, nn

from fuselayers.components import Residual
from tests.components.residual.written_out import Formula, assert_formula, branch, drop, made, norm


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
    normed, total = norm(residual, 0, x), x
    for i, sublayer in enumerate(sublayers):
        total = total + drop(residual, branch(residual, i, sublayer(normed)))
    return total


@pytest.mark.parametrize(
    ("formula", "needs_a_final_norm"),
    [(pre, True), (post, False), (deepnorm, False), (sandwich, True), (parallel, True)],
)
def test_it_is_its_formula(formula: Formula, needs_a_final_norm: bool) -> None:
    assert made(formula.__name__).final_norm is needs_a_final_norm
    assert_formula(formula.__name__, formula)


def test_the_factor_of_deepnorm_grows_with_the_number_of_layers() -> None:
    assert made("deepnorm", num_layers=8).alpha == 2.0
    assert made("deepnorm", num_layers=8, alpha=3.0).alpha == 3.0
    with pytest.raises(ValueError, match=r"^alpha must be above 0, got 0\.0$"):
        made("deepnorm", alpha=0.0)
