from torch import Tensor, nn

from fuselayers.components import Residual
from tests.components.residual.written_out import assert_formula, branch, drop, made, norm


def formula(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    for i, sublayer in enumerate(sublayers):
        y = drop(residual, sublayer(norm(residual, 2 * i, x)))
        x = x + branch(residual, i, norm(residual, 2 * i + 1, y))
    return x


def test_it_is_its_formula() -> None:
    assert_formula("sandwich", formula)


def test_the_stream_is_left_unnormalised() -> None:
    assert made("sandwich").final_norm is True
