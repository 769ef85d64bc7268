import re

import pytest
import torch
from torch import Tensor

from fuselayers.cli.bench.measure import Candidate, disagreement, results

_X = torch.linspace(-3, 3, 50).requires_grad_()
_EXACT = _X.detach().double().requires_grad_()


def _candidate(name: str, function: object, x: Tensor = _X) -> Candidate:
    return Candidate(name, lambda: (function(x),), (x,))  # type: ignore[operator]


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return dy


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (torch.sin, "None$"),
        (lambda x: x.sin() + 1e-4, r"output 0 is off by 1\.\de-04"),
        (lambda x: x.sin() / (x.detach() - x.detach()).abs() * 0, "output 0 is off by nan"),
        (_WrongBackward.apply, "gradient 0 is off by"),
    ],
)
def test_only_right_numbers_agree(function: object, reason: str) -> None:
    eager, truth = results(_candidate("eager", torch.sin)), results(_candidate("truth", torch.sin, _EXACT))
    said = disagreement(results(_candidate("mine", function)), eager=eager, truth=truth)
    assert re.match(reason, str(said))
