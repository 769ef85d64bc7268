"""Options of a stack: layers that differ, and positions that bias the scores."""

import re
from functools import partial

import pytest
import torch
from torch import Tensor

from fuselayers import fuse
from fuselayers.components import Choice, LayerChange, LayerNorm
from fuselayers.components.model import Stack
from fuselayers.ops.cpu import has_kernels
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.partition import saved_bytes
from tests.components.model.small import HEADS
from tests.components.registered import registered


def stack(**changes: object) -> Stack:
    options = {"num_layers": 3, "context_length": 6, "attention": HEADS, "norm": "rms_norm", "causal": True}
    return Stack(8, **(options | changes))


class Headless(torch.nn.Linear):
    """An attention without heads that accepts a bias."""

    def __init__(self, hidden_dim: int, *, causal: bool = True) -> None:
        super().__init__(hidden_dim, hidden_dim)

    def forward(self, x_BTD: Tensor, *, distance_bias: Tensor | None = None) -> Tensor:
        return super().forward(x_BTD)


def test_some_layers_differ() -> None:
    built = stack(
        feedforward="fused_mlp",
        layers=[
            LayerChange("1", feedforward="gated_mlp", norm="layer_norm"),
            LayerChange("-1", attention=Choice("multi_head", {"num_heads": 4}), residual="post"),
        ],
    )
    assert [type(block.feedforward).__name__ for block in built.blocks] == ["FusedMLP", "GatedMLP", "FusedMLP"]
    assert [block.attention.num_heads for block in built.blocks] == [2, 2, 4]
    assert isinstance(built.blocks[1].residual.norms[1], LayerNorm)
    # The last block normalises the stream itself.
    assert built.norm is None
    y = built.run_blocks(torch.randn(2, 5, 8))
    torch.testing.assert_close(y.square().mean(-1), torch.ones(2, 5), rtol=1e-3, atol=1e-3)


# The stack passes `causal` to 'relative'. 'alibi' does not take it, and computes both directions.
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_every_block_gets_the_bias_of_the_position(position: str, causal: bool) -> None:
    built, x = stack(position=position, causal=causal), torch.randn(2, 5, 8)
    bias_HN = built.position.distance_bias(x)
    assert getattr(built.position, "causal", causal) == causal
    expected = x
    for block in built.blocks:
        expected = block(expected, distance_bias=bias_HN)
    torch.testing.assert_close(built.run_blocks(x), built.norm(expected))
    first = built.blocks[0]
    assert not torch.allclose(first(x, distance_bias=torch.zeros_like(bias_HN)), first(x, distance_bias=bias_HN))


@pytest.mark.skipif(INTERPRETED or not has_kernels(), reason="PyTorch's attention reads a bias of every pair")
@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_a_position_saves_a_bias_for_each_distance(position: str) -> None:
    """Not for each query and key, in eager mode and in a graph: a number for each head, and where it is looked up."""
    x, heads, distances = torch.randn(2, 300, 8, requires_grad=True), 2, 2 * 300 - 1
    without, biased = (stack(num_layers=2, position=name) for name in ("none", position))
    for form in (lambda run: run, partial(fuse, backend="eager")):
        less, more = (
            saved_bytes(form(built.run_blocks), x, parameters=built.parameters()) for built in (without, biased)
        )
        assert more - less <= (4 * heads + 8) * distances


def test_heads_that_share_no_bias() -> None:
    one_bias = (
        "all layers share the bias of position 'alibi', so they need the same number of heads: layer 0 has 2, layer 1 "
        "has "
    )
    no_heads = (
        "position 'alibi' has a bias for each head, and this attention has no heads; choose an attention with "
        "num_heads, or another position"
    )
    four = Choice("multi_head", {"num_heads": 4})
    with registered("attention", headless=Headless):
        for options, text in (
            ({"attention": "headless"}, no_heads),
            ({"layers": [LayerChange("1", attention=four)]}, f"{one_bias}4"),
            ({"layers": [LayerChange("1", attention="headless")]}, f"{one_bias}None"),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                stack(position="alibi", **options)
