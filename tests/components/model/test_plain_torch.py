import pytest
import torch

from fuselayers.components.model.plain_torch import plain_twin
from fuselayers.configs import build

SMALL_DECODER = ["model.num_layers=2", "model.hidden_dim=32"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt_nano", [*SMALL_DECODER, "feedforward.activation=gelu_tanh"]),
        ("gpt_nano", [*SMALL_DECODER, "feedforward.bias=false", "model.tie_embeddings=false"]),
        ("opt_tiny", []),
        ("llama_tiny", ["model.num_layers=2", "model.hidden_dim=64"]),
        ("bert_tiny", ["model.num_layers=2", "model.hidden_dim=32"]),
        ("vit_tiny", ["model.num_layers=2", "attention.num_heads=8"]),
    ],
)
def test_the_twin_has_the_same_losses_and_gradients(name: str, overrides: list[str]) -> None:
    model = build(name, [*overrides, "fusion=off"]).eval()
    twin = plain_twin(model)
    assert not twin.training
    inputs = [
        tensor.normal_() if tensor.is_floating_point() else tensor.random_(10)
        for tensor in model.example_inputs(2, "cpu")
    ]
    (model(*inputs)).backward()
    loss = twin(*inputs)
    loss.backward()
    torch.testing.assert_close(loss, model(*inputs))
    own, theirs = (dict(sorted(form.named_parameters())) for form in (model, twin))
    assert own.keys() == theirs.keys()
    for key, parameter in own.items():
        torch.testing.assert_close(theirs[key].grad, parameter.grad, atol=1e-5, rtol=1e-4)
        assert theirs[key] is not parameter


def test_the_twin_drops_where_the_model_does() -> None:
    model = build("gpt_nano", [*SMALL_DECODER, "model.dropout=0.5", "attention.dropout=0.25", "fusion=off"]).train()
    twin = plain_twin(model)
    assert twin.training
    drops = [module.p for module in twin.modules() if isinstance(module, torch.nn.Dropout)]
    assert drops == [0.5] * 5  # the embedding; in each block both branches, and the feedforward
    assert [block.attention.dropout for block in twin.blocks] == [0.25, 0.25]  # type: ignore[union-attr]
    apart = build("gpt_nano", [*SMALL_DECODER, "model.dropout=0.5", "model.embedding_dropout=0.125", "fusion=off"])
    assert plain_twin(apart).drop.p == 0.125  # type: ignore[union-attr]
    state = torch.get_rng_state()
    plain_twin(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "overrides", "component"),
    [
        ("gpt_nano", ["attention=linear"], "LinearAttention"),
        ("mistral_tiny", [], "MultiHeadAttention"),
        ("t5_tiny", [], "EncoderDecoder"),
        ("gpt_nano", ["model.head_bias=true"], "Decoder"),
        ("llama_tiny", ["position.scaling=linear", "position.factor=2"], "RotaryPosition"),
    ],
)
def test_a_model_without_a_twin_names_the_component(name: str, overrides: list[str], component: str) -> None:
    with pytest.raises(ValueError, match=rf"^no model in plain PyTorch is known for {component}"):
        plain_twin(build(name, [*overrides, "fusion=off"]))
