import math

import pytest
import torch
from torch import nn

from fuselayers.components import Choice, Decoder, Encoder, initialise_bert, initialise_gpt2

SIZES = {
    "vocab_size": 200,
    "hidden_dim": 128,
    "num_layers": 8,
    "context_length": 64,
    "attention": Choice("multi_head", {"num_heads": 4}),
}


def deviations(model: nn.Module) -> dict[str, float]:
    return {name: value.std().item() for name, value in model.named_parameters() if value.dim() == 2}


@pytest.mark.parametrize("feedforward", ["mlp", "fused_mlp", "gated_mlp"])
@pytest.mark.parametrize("std", [0.02, 0.1])
def test_gpt2(feedforward: str, std: float) -> None:
    model = Decoder(**SIZES, feedforward=feedforward, init_std=std)  # type: ignore[arg-type]
    smaller = 0
    for name, deviation in deviations(model).items():
        residual = name.endswith(("attention.out.weight", "feedforward.down.weight"))
        smaller += residual
        assert deviation == pytest.approx(std / math.sqrt(2 * 8) if residual else std, rel=0.05), name
    assert smaller == 2 * 8
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            assert value.abs().max() == 0, name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            assert abs(value.mean().item()) < 0.05 * std, name


def test_bert_has_no_smaller_weights() -> None:
    model = Encoder(**SIZES, init_std=0.05)  # type: ignore[arg-type]
    found = deviations(model)
    assert found.pop("segment.weight") == pytest.approx(0.05, rel=0.2)  # two rows are few
    for name, deviation in found.items():
        assert deviation == pytest.approx(0.05, rel=0.05), name


def test_the_seed_decides_and_layers_differ() -> None:
    def first_weights() -> list[torch.Tensor]:
        torch.manual_seed(7)
        model = Decoder(**SIZES)  # type: ignore[arg-type]
        return [block.attention.qkv.weight for block in model.blocks]

    once, again = first_weights(), first_weights()
    assert torch.equal(once[0], again[0])
    assert not torch.equal(once[0], once[1])


def test_a_model_from_the_meta_device_can_be_initialised_later() -> None:
    with torch.device("meta"):
        model = Decoder(**SIZES)  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    initialise_gpt2(model, num_layers=8)
    assert not [name for name, value in model.named_parameters() if value.isnan().any()]
    assert math.isfinite(model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).item())


def test_plain_torch_modules_too() -> None:
    model = nn.Sequential(
        nn.Linear(64, 64), nn.LayerNorm(64), nn.RMSNorm(64), nn.LayerNorm(64, elementwise_affine=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
    initialise_bert(model, std=0.3)
    assert model[0].weight.std().item() == pytest.approx(0.3, rel=0.05)
    assert model[0].bias.abs().max() == 0
    assert (model[1].weight == 1).all()
    assert (model[1].bias == 0).all()
    assert (model[2].weight == 1).all()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^num_layers must be at least 1, got 0$"):
        initialise_gpt2(nn.Linear(1, 1), num_layers=0)
    for initialise in (
        lambda m, std: initialise_gpt2(m, num_layers=1, std=std),
        lambda m, std: initialise_bert(m, std=std),
    ):
        with pytest.raises(ValueError, match=r"^std must be at least 0, got -0\.1$"):
            initialise(nn.Linear(1, 1), -0.1)
