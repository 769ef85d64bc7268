import sys
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components import MLP, Linear, MultiHeadAttention

linear_module: Any = sys.modules["fuselayers.ops.linear"]


@pytest.mark.parametrize("layer", [MLP(128), MultiHeadAttention(128, num_heads=4)], ids=["mlp", "attention"])
def test_layers_multiply_by_the_op(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    takes = linear_module._takes_onednn
    monkeypatch.setattr(linear_module, "_takes_onednn", lambda *factors: calls.append(factors) or takes(*factors))
    layer(torch.randn(2, 8, 128))
    assert len(calls) == 2  # the projection, or `up`; and the one after it


def test_it_is_a_linear_layer_of_torch() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 4)
    torch.manual_seed(0)
    layer, x = Linear(3, 4), torch.randn(2, 3)
    assert isinstance(layer, nn.Linear)
    assert torch.equal(layer(x), plain(x))
