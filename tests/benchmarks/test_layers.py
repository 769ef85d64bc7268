import torch

from benchmarks.layers import TransformerLayer


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
