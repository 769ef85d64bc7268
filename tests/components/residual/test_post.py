from torch import Tensor, nn

from fuselayers.components import Residual
from tests.components.residual.written_out import assert_formula, branch, drop, made, norm


def formula(residual: Residual, x: Tensor, sublayers: nn.ModuleList) -> Tensor:
    for i, sublayer in enumerate(sublayers):
        x = norm(residual, i, x + drop(residual, branch(residual, i, sublayer(x))))
    return x


def test_it_is_its_formula() -> None:
    assert_formula("post", formula)


def test_the_stream_is_left_normalised() -> None:
    assert made("post").final_norm is False
