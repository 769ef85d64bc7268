import pytest
import torch

from fuselayers.components import Choice, LayerNorm, LearnedPosition, NoPosition, RMSNorm, RotaryPosition
from fuselayers.components.model.stack import build_blocks, build_final_norm, build_position


def blocks_of(kind: str, **changes: object) -> torch.nn.ModuleList:
    options = {
        "num_layers": 3,
        "attention": Choice("multi_head", {"num_heads": 2}),
        "feedforward": "fused_mlp",
        "norm": "rms_norm",
        "dropout": 0.25,
        "causal": True,
        "backend": "eager",
        "partition": "default",
        "position": RotaryPosition(),
    }
    return build_blocks(kind, 8, **(options | changes))


def test_every_block_has_its_own_weights_and_the_same_options() -> None:
    blocks = blocks_of("pre_norm")
    assert len(blocks) == 3
    assert len({block.feedforward.up.weight.data_ptr() for block in blocks}) == 3
    for block in blocks:
        assert block.dropout == 0.25
        assert (block.feedforward.backend, block.feedforward.partition) == ("eager", "default")
        assert isinstance(block.norm1, RMSNorm)


def test_only_blocks_that_leave_the_stream_unnormalised_need_a_final_norm() -> None:
    # The ancestor lost the final norm of a pre-norm stack of more than one layer.
    assert isinstance(build_final_norm(blocks_of("pre_norm"), "layer_norm", 8), LayerNorm)
    assert build_final_norm(blocks_of("post_norm"), "layer_norm", 8) is None


def test_a_position_gets_the_sizes_it_needs() -> None:
    learned = build_position("learned", context_length=5, hidden_dim=8)
    assert isinstance(learned, LearnedPosition)
    assert [tuple(value.shape) for value in learned.parameters()] == [(5, 8)]
    rotary = build_position(Choice("rotary", {"base": 500.0}), context_length=5, hidden_dim=8)
    assert isinstance(rotary, RotaryPosition)
    assert rotary.base == 500.0


def test_heads_that_the_position_cannot_rotate() -> None:
    odd = Choice("multi_head", {"num_heads": 2, "head_dim": 3})
    assert len(blocks_of("pre_norm", attention=odd, position=NoPosition())) == 3
    with pytest.raises(ValueError, match=r"^rotary needs an even number of channels per head, two at least, got 3$"):
        blocks_of("pre_norm", attention=odd)


def test_a_stack_has_a_layer() -> None:
    with pytest.raises(ValueError, match=r"^num_layers must be at least 1, got 0$"):
        blocks_of("pre_norm", num_layers=0)
