"""A residual style around linear sublayers, by the module and by its formula. Used by the test of every style."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.components import Choice, Residual, create
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise

D = 6
Formula = Callable[[Residual, Tensor, nn.ModuleList], Tensor]


class Branches(nn.Module):
    def __init__(self, residual: Residual, number: int, formula: Formula | None = None) -> None:
        super().__init__()
        self.residual, self.formula = residual, formula
        self.linear = nn.ModuleList(nn.Linear(D, D) for _ in range(number)).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.formula is not None:
            return self.formula(self.residual, x, self.linear)
        y: Tensor = self.residual(x, list(self.linear))
        return y


def made(kind: str, *, number: int = 2, **options: object) -> Residual:
    built_in = {name: options.pop(name) for name in ("layer", "num_layers", "dropout") if name in options}
    residual: Residual = create("residual", Choice(kind, options), D, num_sublayers=number, **built_in)
    return randomise(residual).double()  # type: ignore[return-value]


def assert_formula(kind: str, formula: Formula) -> None:
    """Compare values and gradients with two and three sublayers, in training and in eval mode, with every option."""
    every = {"dropout": 0.3, "layer_scale": 0.5, "stochastic_depth": 0.5, "layer": 7, "num_layers": 8}
    for number in (2, 3):
        for options in ({"num_layers": 8}, {"num_layers": 8, "dropout": 0.3}, every):
            residual = made(kind, number=number, **options)
            ours, theirs = Branches(residual, number), Branches(residual, number, formula)
            theirs.linear = ours.linear
            x = torch.randn(4, 5, D, dtype=torch.float64)
            assert_same_step(theirs, ours, x, rtol=1e-7, atol=1e-7)
            torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


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
