"""What both blocks do alike."""

import copy
import pickle
import re

import pytest
import torch

from fuselayers.components import Choice, FusedMLP, GatedMLP, PostNormBlock, PreNormBlock
from fuselayers.partition import fuse
from tests.components.compare import assert_same_step, randomise

HEADS = Choice("multi_head", {"num_heads": 2})
BLOCKS = [PreNormBlock, PostNormBlock]


@pytest.mark.parametrize("block", BLOCKS)
def test_parts_are_built_from_their_choices(block: type[PreNormBlock]) -> None:
    attention = Choice("multi_head", {"num_heads": 4, "num_kv_heads": 2, "dropout": 0.2})
    feedforward = Choice("gated_mlp", {"multiple_of": 8, "dropout": 0.1})
    built = block(
        8,
        attention=attention,
        feedforward=feedforward,
        norm=Choice("rms_norm", {"eps": 0.5}),
        dropout=0.3,
        causal=False,
    )
    assert (built.attention.num_kv_heads, built.attention.dropout, built.attention.causal) == (2, 0.2, False)
    assert isinstance(built.feedforward, GatedMLP)
    assert (built.feedforward.down.in_features, built.feedforward.dropout, built.feedforward.backend) == (24, 0.1, None)
    assert [norm.eps for norm in (built.norm1, built.norm2)] == [0.5, 0.5]
    assert built.norm1 is not built.norm2
    assert built.dropout == 0.3


@pytest.mark.parametrize("block", BLOCKS)
def test_the_backend_goes_to_the_layers_that_take_one(block: type[PreNormBlock]) -> None:
    built = block(8, attention=HEADS, feedforward="fused_mlp", backend="eager", partition="default")
    assert isinstance(built.feedforward, FusedMLP)
    assert (built.feedforward.backend, built.feedforward.partition) == ("eager", "default")
    block(8, attention=HEADS, feedforward="mlp", backend="eager")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_fused_feedforward_changes_nothing(block: type[PreNormBlock], p: float, backend: str | None) -> None:
    mlp, fused_mlp = Choice("mlp", {"dropout": p}), Choice("fused_mlp", {"dropout": p})
    plain = randomise(block(8, attention=HEADS, feedforward=mlp, dropout=p))
    fused = block(8, attention=HEADS, feedforward=fused_mlp, dropout=p, backend=backend)
    assert list(plain.state_dict()) == list(fused.state_dict())
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    assert_same_step(plain, fused, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_whole_block_can_be_fused(block: type[PreNormBlock]) -> None:
    heads = Choice("multi_head", {"num_heads": 2, "dropout": 0.2})
    plain = randomise(block(8, attention=heads, feedforward="fused_mlp", dropout=0.3))
    fused = fuse(plain, backend="eager", fallback=(), fullgraph=True)
    assert_same_step(plain, fused, torch.randn(2, 5, 8), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", BLOCKS)
def test_copies(block: type[PreNormBlock]) -> None:
    built = randomise(block(8, attention=HEADS, feedforward="fused_mlp", dropout=0.3, backend="eager"))
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert_same_step(built, other, torch.randn(2, 5, 8))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"attention": "multihead"}, "no attention 'multihead'; did you mean 'multi_head'? there are: multi_head"),
        ({"attention": "multi_head"}, "attention 'multi_head' needs the option 'num_heads' (number of query heads.)"),
        ({"feedforward": "mpl"}, "no feedforward 'mpl'; did you mean 'mlp'? there are: fused_mlp, gated_mlp, mlp"),
        ({"norm": "layernorm"}, "no norm 'layernorm'; did you mean 'layer_norm'? there are: layer_norm, rms_norm"),
        ({"dropout": 1.0}, "dropout probability p must satisfy 0 <= p < 1, got 1.0"),
    ],
)
def test_errors(block: type[PreNormBlock], arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        block(8, **{"attention": HEADS, **arguments})  # type: ignore[arg-type]
