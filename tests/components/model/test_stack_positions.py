"""Positions that work through the scores, in a stack."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fuselayers.components import Choice, LayerChange, MultiHeadAttention
from fuselayers.components.model.stack import Stack
from fuselayers.partition import fuse
from tests.components.registered import registered

SIZES = {"num_layers": 2, "context_length": 6, "causal": True}


class Biased(MultiHeadAttention):
    """Attention written out, with a bias on its scores."""

    def forward(self, x_BTD: Tensor, *, bias: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / self.head_dim**0.5 + bias
        hidden = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, -torch.inf) if self.causal else scores
        mixed: Tensor = self.out((shares.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return mixed


class Headless(torch.nn.Linear):
    """An attention without heads, which could take a bias all the same."""

    def __init__(self, hidden_dim: int, *, causal: bool = True) -> None:
        super().__init__(hidden_dim, hidden_dim)

    def forward(self, x_BTD: Tensor, *, bias: Tensor | None = None) -> Tensor:
        return super().forward(x_BTD)


@pytest.fixture(autouse=True)
def attentions() -> Iterator[None]:
    with registered("attention", biased=Biased, headless=Headless):
        yield


def heads(number: int) -> Choice:
    return Choice("biased", {"num_heads": number})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_every_block_gets_the_bias(position: str, causal: bool) -> None:
    stack = Stack(8, attention=heads(2), position=position, **{**SIZES, "causal": causal})  # type: ignore[arg-type]
    x = torch.randn(2, 5, 8)
    bias_HTS = stack.position.bias(x)
    assert bias_HTS is not None
    assert getattr(stack.position, "causal", causal) == causal
    expected = x
    for block in stack.blocks:
        expected = block(expected, bias=bias_HTS)
    assert stack.norm is not None
    torch.testing.assert_close(stack.run_blocks(x), stack.norm(expected))
    # The bias counts: without one the numbers are others.
    assert not torch.allclose(stack.blocks[0](x, bias=torch.zeros_like(bias_HTS)), stack.blocks[0](x, bias=bias_HTS))


def test_a_learned_bias_learns_through_the_fusion_core() -> None:
    stack = Stack(8, attention=heads(2), position="relative", **SIZES)  # type: ignore[arg-type]
    x = torch.randn(2, 5, 8)
    gradients = []
    for run in (stack.run_blocks, fuse(stack.run_blocks, backend="eager")):
        stack.zero_grad()
        run(x).square().sum().backward()
        gradients.append(stack.position.table.weight.grad.clone())  # type: ignore[union-attr]
    torch.testing.assert_close(gradients[1], gradients[0])
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_errors(position: str) -> None:
    text = (
        f"position {position!r} has a bias for each head, and this attention has no heads; choose an attention with "
        "num_heads, or another position"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Stack(8, attention="headless", position=position, **SIZES)  # type: ignore[arg-type]
    text = (
        f"position {position!r} has one bias for the heads of every layer, which must be as many: layer 0 has 2, "
        "layer 1 has 4"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Stack(8, attention=heads(2), position=position, layers=[LayerChange("1", attention=heads(4))], **SIZES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer 0 has 2, layer 1 has None$"):
        Stack(8, attention=heads(2), position=position, layers=[LayerChange("1", attention="headless")], **SIZES)  # type: ignore[arg-type]
