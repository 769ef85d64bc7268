import pytest
import torch
from torch import Tensor, nn

from fuselayers.cli.train.compare import (
    EAGER,
    FUSED,
    PLAIN,
    compare,
    compared_models,
    eager_model,
)
from fuselayers.configs import Config, build, compose

_OVERRIDES = [
    "model.hidden_dim=32",
    "model.num_layers=2",
    "model.context_length=16",
    "attention.num_heads=2",
    "feedforward=fused_mlp",
    "fusion=off",
]
_CPU = torch.device("cpu")


def _models(config: Config, fused: nn.Module) -> dict[str, nn.Module]:
    weights = fused.state_dict()
    eager = eager_model(config, weights=weights, device=_CPU)
    return compared_models(config, fused, eager, weights=weights, device=_CPU)


def _batches(number: int) -> list[tuple[Tensor, Tensor]]:
    return [tuple(torch.randint(256, (2, 4, 16))) for _ in range(number)]  # type: ignore[misc]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_same_weights_same_masks_same_losses_and_the_weights_stay(dropout: float) -> None:
    config = compose(overrides=[*_OVERRIDES, f"model.dropout={dropout}"])
    fused, batches = build(config).eval(), _batches(3)
    models = _models(config, fused)
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}

    result = compare(models, batches, repeats=2, device=_CPU)

    assert [row.candidate for row in result.rows] == [PLAIN, EAGER, FUSED]
    kept = {row.candidate: row.kept for row in result.rows}
    assert type(models[EAGER].blocks[0].feedforward).__name__ == "MLP"  # type: ignore[index,union-attr]
    assert result.loss_difference < 1e-6
    assert result.num_batches == 3
    assert [len(row.seconds["forward_backward"]) for row in result.rows] == [2, 2, 2]
    assert 0 < kept[FUSED] <= kept[EAGER]
    if dropout:
        assert kept[EAGER] < kept[PLAIN]
    assert all(parameter.grad is None for parameter in fused.parameters())
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(("name", "figure"), [(EAGER, "loss_difference"), (PLAIN, "plain_difference")])
def test_a_model_that_computes_something_else_is_found(name: str, figure: str) -> None:
    config = compose(overrides=_OVERRIDES)
    models, batches = _models(config, build(config)), _batches(2)
    equal = getattr(compare(models, batches, repeats=1, device=_CPU), figure)
    with torch.no_grad():
        next(models[name].parameters()).mul_(2)
    assert equal < 1e-5 < 1e-4 < getattr(compare(models, batches, repeats=1, device=_CPU), figure)


def test_a_model_without_a_twin_is_compared_with_its_eager_layers() -> None:
    config = compose(overrides=[*_OVERRIDES, "attention=linear"])
    result = compare(_models(config, build(config)), _batches(1), repeats=1, device=_CPU)
    assert [row.candidate for row in result.rows] == [EAGER, FUSED]


@pytest.mark.parametrize("fusion", ["fusion=off", "fusion.compress=bfloat16"])
def test_int8_is_compared_only_with_exact_saved_values(fusion: str) -> None:
    config = compose(overrides=[*_OVERRIDES[:-1], fusion])
    assert list(_models(config, build(config))) == [PLAIN, EAGER, FUSED]
