from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fuselayers.components import (
    MLP,
    Carried,
    DynamicTanh,
    FusedMLP,
    GatedMLP,
    LayerNorm,
    LearnedPosition,
    RelativePosition,
    RMSNorm,
    TokenEmbedding,
    carry_weights,
)
from fuselayers.partition import fuse

from .compare import randomise


def models(*layers: nn.Module) -> nn.ModuleDict:
    """A model with one block for each layer."""
    blocks = nn.ModuleList(nn.ModuleDict({"feedforward": layer}) for layer in layers)
    return nn.ModuleDict({"blocks": blocks})


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_another_class_with_the_same_keys_gets_every_weight() -> None:
    source, target = randomise(MLP(5, bias=True)), FusedMLP(5)
    carried = carry_weights(source, target)
    assert carried.complete
    assert carried.carried == ("up.weight", "up.bias", "down.weight", "down.bias")
    assert str(carried) == "all 4 weights carried over"
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


def test_a_submodule_of_another_class_carries_as_a_whole_or_not_at_all() -> None:
    """The `up` and `down` of a gated MLP have the shapes of an MLP's here, but belong to another function."""
    source, target = randomise(MLP(4, expansion=2.0, bias=False)), GatedMLP(4, expansion=2.0, multiple_of=1)
    assert source.up.weight.shape == target.up.weight.shape
    before = state_of(target)
    carried = carry_weights(models(source), models(target))
    assert carried.carried == ()
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert str(carried).splitlines() == [
        "0 of 3 weights carried over; what did not:",
        "  blocks.0.feedforward: gate.weight, up.weight, down.weight new; up.weight, down.weight left behind",
    ]


@pytest.mark.parametrize(
    ("build_first", "build_second"),
    [
        (lambda: RMSNorm(4, unit_offset=True), lambda: RMSNorm(4)),
        (lambda: RMSNorm(4, unit_offset=True), lambda: LayerNorm(4)),
        (lambda: RMSNorm(4, unit_offset=True), lambda: DynamicTanh(4)),
        (lambda: LayerNorm(4), lambda: DynamicTanh(4)),
        (lambda: TokenEmbedding(6, 4, scale=True), lambda: TokenEmbedding(6, 4)),
        (lambda: TokenEmbedding(6, 4, scale=True), lambda: nn.Embedding(6, 4)),
        (lambda: LearnedPosition(6, 4), lambda: RelativePosition(num_heads=4, num_buckets=6)),
    ],
)
def test_a_weight_that_is_another_quantity_does_not_carry(
    build_first: Callable[[], nn.Module], build_second: Callable[[], nn.Module]
) -> None:
    for build_source, build_target in ((build_first, build_second), (build_second, build_first)):
        source, target = randomise(build_source()), build_target()
        before = state_of(target)
        carried = carry_weights(source, fuse(target, backend="eager"))
        assert carried == Carried(new=tuple(target.state_dict()), left=tuple(source.state_dict()))
        for name, value in target.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert carry_weights(source, build_source()).complete


def test_another_shape_is_told_with_both_and_left_as_it_was() -> None:
    source, target = randomise(MLP(4)), MLP(4, expansion=2.0)
    before = state_of(target)
    carried = carry_weights(source, target)
    assert carried.reshaped == {
        "up.weight": ((16, 4), (8, 4)),
        "up.bias": ((16,), (8,)),
        "down.weight": ((4, 16), (4, 8)),
    }
    assert carried.carried == ("down.bias",)
    assert str(carried).splitlines()[1] == (
        "  up.weight was [16, 4], is [8, 4]; up.bias was [16], is [8]; down.weight was [4, 16], is [4, 8]"
    )
    for name in carried.reshaped:
        assert torch.equal(target.state_dict()[name], before[name]), name


def test_models_without_values() -> None:
    assert carry_weights(MLP(3).to("meta"), MLP(3).to("meta")).complete
    with pytest.raises(ValueError, match=r"^up.weight of the source is on the meta .*; load its weights first$"):
        carry_weights(MLP(3).to("meta"), MLP(3))
    with pytest.raises(ValueError, match=r"^up.weight of the target is on the meta .*; call its to_empty first$"):
        carry_weights(MLP(3), MLP(3).to("meta"))
