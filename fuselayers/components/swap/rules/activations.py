"""The tanh form of GELU, which transformers also writes op by op, as one op of torch."""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..rule import Rule


def gelu_tanh(self: nn.Module, *, x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    if x.is_floating_point():
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "gelu_tanh",
        of=(
            """
            def forward(self, x):
                cubic = x + 0.044715 * torch.pow(x, 3.0)
                return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))
            """,
            """
            def forward(self, x):
                return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
            """,
        ),
        forward=gelu_tanh,
    ),
)
