import pytest
import torch

from fuselayers.components import (
    Choice,
    LayerChange,
    LayerNorm,
    LearnedPosition,
    RMSNorm,
    RotaryPosition,
)
from fuselayers.components.model import Stack

HEADS = Choice("multi_head", {"num_heads": 2})


def stack(**changes: object) -> Stack:
    options = {
        "num_layers": 3,
        "context_length": 5,
        "attention": HEADS,
        "feedforward": "fused_mlp",
        "norm": "rms_norm",
        "position": "rotary",
        "dropout": 0.25,
        "causal": True,
        "backend": "eager",
        "partition": "default",
    }
    return Stack(8, **(options | changes))  # type: ignore[arg-type]


def test_every_block_has_its_own_weights_and_the_same_options() -> None:
    blocks = stack().blocks
    assert len(blocks) == 3
    assert len({block.feedforward.up.weight.data_ptr() for block in blocks}) == 3
    for block in blocks:
        assert block.residual.dropout == 0.25
        assert (block.feedforward.backend, block.feedforward.partition) == ("eager", "default")
        assert isinstance(block.residual.norms[0], RMSNorm)


def test_some_layers_differ() -> None:
    built = stack(
        layers=[
            LayerChange("1", feedforward="gated_mlp", norm="layer_norm"),
            LayerChange("-1", attention=Choice("multi_head", {"num_heads": 4}), residual="post"),
        ]
    )
    assert [type(block.feedforward).__name__ for block in built.blocks] == ["FusedMLP", "GatedMLP", "FusedMLP"]
    assert [block.attention.num_heads for block in built.blocks] == [2, 2, 4]
    assert isinstance(built.blocks[1].residual.norms[1], LayerNorm)
    # The last block normalises the stream itself.
    assert built.norm is None
    y = built.run_blocks(torch.randn(2, 5, 8))
    torch.testing.assert_close(y.square().mean(-1), torch.ones(2, 5), rtol=1e-3, atol=1e-3)


def test_only_blocks_that_leave_the_stream_unnormalised_need_a_final_norm() -> None:
    # The ancestor lost the final norm of a pre-norm stack of more than one layer.
    assert isinstance(stack(norm="layer_norm").norm, LayerNorm)
    assert stack(residual="post").norm is None


def test_the_depth_reaches_the_residual_style() -> None:
    built = stack(residual=Choice("deepnorm", {"stochastic_depth": 0.3}))
    assert [block.residual.skipped for block in built.blocks] == pytest.approx([0.1, 0.2, 0.3])
    assert {block.residual.alpha for block in built.blocks} == {6**0.25}


def test_a_position_gets_the_sizes_it_needs() -> None:
    learned = stack(position="learned").position
    assert isinstance(learned, LearnedPosition)
    assert [tuple(value.shape) for value in learned.parameters()] == [(5, 8)]
    rotary = stack(position=Choice("rotary", {"base": 500.0})).position
    assert isinstance(rotary, RotaryPosition)
    assert rotary.base == 500.0


def test_heads_that_the_position_cannot_rotate() -> None:
    odd = Choice("multi_head", {"num_heads": 2, "head_dim": 3})
    assert len(stack(attention=odd, position="none").blocks) == 3
    text = r"^position 'rotary' needs an even number of channels per head, two at least, got 3$"
    with pytest.raises(ValueError, match=text):
        stack(attention=odd)
    with pytest.raises(ValueError, match=text):
        stack(layers=[LayerChange("2", attention=odd)])


def test_a_stack_has_a_layer() -> None:
    with pytest.raises(ValueError, match=r"^num_layers must be at least 1, got 0$"):
        stack(num_layers=0)
