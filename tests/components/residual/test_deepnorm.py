import pytest
from torch import Tensor, nn

from fuselayers.components import Residual
from tests.components.residual.written_out import assert_formula, branch, drop, made, norm


def formula(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    for i, sublayer in enumerate(sublayers):
        x = norm(residual, i, 2.0 * x + drop(residual, branch(residual, i, sublayer(x))))
    return x


def test_it_is_its_formula() -> None:
    assert_formula("deepnorm", formula)


def test_the_stream_is_left_normalised() -> None:
    assert made("deepnorm").final_norm is False


def test_the_factor_grows_with_the_number_of_layers() -> None:
    assert made("deepnorm", num_layers=8).alpha == 2.0
    assert made("deepnorm", num_layers=8, alpha=3.0).alpha == 3.0
    with pytest.raises(ValueError, match=r"^alpha must be above 0, got 0\.0$"):
        made("deepnorm", alpha=0.0)
