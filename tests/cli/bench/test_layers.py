import math

import pytest
import torch
import torch.nn.functional as F

from fuselayers.cli.bench.layers import GPT, LAYERS, LlamaLayer, TransformerLayer


def test_written_out_attention_is_the_fused_one() -> None:
    torch.manual_seed(0)
    fused = TransformerLayer(32, 4, dropout=0.0)
    written_out = TransformerLayer(32, 4, dropout=0.0, written_out=True)
    written_out.load_state_dict(fused.state_dict())
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(written_out(x), fused(x))


def test_pre_norm_adds_to_the_stream_and_post_norm_normalises_it() -> None:
    x = torch.randn(2, 5, 32)
    post = TransformerLayer(32, 4, dropout=0.0, post_norm=True)(x)
    torch.testing.assert_close(post.mean(-1), torch.zeros(2, 5), atol=1e-5, rtol=0)
    layer = TransformerLayer(32, 4, dropout=0.0)
    for linear in (layer.out, layer.down):
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    torch.testing.assert_close(layer(x), x)


def test_causal_layers_do_not_look_ahead() -> None:
    x = torch.randn(1, 6, 32)
    changed = x.clone()
    changed[:, 4:] += 1
    for layer in (TransformerLayer(32, 4, dropout=0.0), LlamaLayer(32, 4)):
        torch.testing.assert_close(layer(changed)[:, :4], layer(x)[:, :4])


def test_llama_knows_positions_only_as_distances() -> None:
    """Rotation leaves a product of queries and keys to their distance: the same tokens, all equal, mix to the same."""
    layer = LlamaLayer(32, 4)
    x = torch.randn(1, 1, 32).expand(1, 5, 32)
    torch.testing.assert_close(layer(x), layer(x)[:, :1].expand(1, 5, 32))


def test_a_model_starts_at_chance() -> None:
    torch.manual_seed(0)
    model = GPT(1, hidden_dim=32, context_length=16, vocab_size=50)
    torch.nn.init.zeros_(model.head.weight)
    tokens = torch.randint(50, (2, 16))
    assert model(tokens, tokens).item() == pytest.approx(math.log(50))


@pytest.mark.parametrize("name", LAYERS)
def test_every_case_makes_a_layer(name: str) -> None:
    layer = LAYERS[name].make(64, 4, dropout=0.0)
    x = torch.randn(2, 3, 64, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    (gradient,) = torch.autograd.grad(F.mse_loss(out, torch.zeros_like(out)), x)
    assert gradient.abs().sum() > 0
