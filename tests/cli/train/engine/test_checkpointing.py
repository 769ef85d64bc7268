import pytest
import torch
from torch import Tensor, nn

from fuselayers.cli.train.engine import fusion_of
from fuselayers.cli.train.engine.checkpointing import checkpoint_blocks
from fuselayers.configs import build, compose
from fuselayers.configs.build import fuse_as
from fuselayers.partition import saved_bytes

_DROPOUT = ["model.dropout=0.1", "attention.dropout=0.1", "feedforward.dropout=0.1"]
_SMALL = ["model.hidden_dim=32", "model.num_layers=3", "model.context_length=32", "attention.num_heads=2", *_DROPOUT]


def _model(*overrides: str) -> nn.Module:
    torch.manual_seed(0)
    return build("gpt_nano", [*_SMALL, "fusion=off", *overrides])


def _tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(256, (4, 32), generator=generator) for _ in range(2))  # type: ignore[return-value]


def _gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(2)
    model(*_tokens()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# torch recomputes eager blocks, the fusion core recomputes fused blocks. Each way recomputes another set of values.
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "fused"])
@pytest.mark.parametrize(("way", "share"), [("block", 0.45), ("selective", None)])
def test_less_is_saved_and_the_masks_are_the_same(way: str, share: float | None, fused: bool) -> None:
    fusion = compose("gpt_nano", ["fusion=eager", "fusion.scope=block"]).fusion
    layers = f"model.num_layers={1 if fused else 3}"
    plain, model = _model(layers), _model(layers)
    checkpoint_blocks(model, way)
    if fused:
        fuse_as(plain, fusion)
        fuse_as(model, fusion)
    for gradient, expected in zip(_gradients(model), _gradients(plain), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    if share is not None or fused:
        kept, before = (saved_bytes(form, *_tokens(), parameters=list(form.parameters())) for form in (model, plain))
        assert kept < (before if fused or share is None else share * before)


def test_a_reversible_block_is_refused() -> None:
    text = "^parallel.checkpointing=block recomputes blocks, and a reversible block keeps no activations that could be "
    with pytest.raises(ValueError, match=text):
        checkpoint_blocks(_model("model.block=reversible"), "block")


@pytest.mark.parametrize("way", ["block", "selective"])
def test_a_checkpoint_in_a_fused_block_of_a_divided_model_is_refused(way: str) -> None:
    asked = [f"parallel.checkpointing={way}", "parallel.tp=2"]
    text = (
        f"^parallel.checkpointing={way} recomputes inside the blocks that fusion.scope=block compiles, which torch ca"
    )
    with pytest.raises(ValueError, match=text):
        fusion_of(compose("gpt_nano", asked))
    assert fusion_of(compose("gpt_nano", [*asked, "fusion=off"])).scope == "none"


def test_a_budget_is_the_partition_of_the_fusion_core() -> None:
    asked = "parallel.checkpointing=budget:0.3"
    assert fusion_of(compose(overrides=[asked])).partition == "budget:0.3"
    assert fusion_of(compose()) == compose().fusion
    text = (
        "^parallel.checkpointing=budget:0.3 lets the fusion core choose what is kept, but fusion.scope is none; set "
        "fusion.scope=block or model, or parallel.checkpointing=block$"
    )
    with pytest.raises(ValueError, match=text):
        fusion_of(compose(overrides=[asked, "fusion=off"]))
