import torch

from benchmarks.layers import TransformerLayer


def test_written_out_attention_is_the_fused_one() -> None:
    torch.manual_seed(0)
    fused = TransformerLayer(32, 4, dropout=0.0)
    written_out = TransformerLayer(32, 4, dropout=0.0, written_out=True)
    written_out.load_state_dict(fused.state_dict())
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(written_out(x), fused(x))
