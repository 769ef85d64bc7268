from torch import Tensor, nn

from fuselayers.components import Residual
from tests.components.residual.written_out import assert_formula, branch, drop, made, norm


def formula(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    normed = norm(residual, 0, x)
    total = x
    for i, sublayer in enumerate(sublayers):
        total = total + drop(residual, branch(residual, i, sublayer(normed)))
    return total


def test_it_is_its_formula() -> None:
    assert_formula("parallel", formula)


def test_the_stream_is_left_unnormalised() -> None:
    assert made("parallel").final_norm is True
