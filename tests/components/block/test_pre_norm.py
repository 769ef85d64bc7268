import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.components import Choice, PreNormBlock
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise


class WrittenOut(nn.Module):
    """The same block in plain torch; only dropout's masks are the library's."""

    def __init__(self, block: PreNormBlock) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.feedforward = (
            block.norm1,
            block.attention,
            block.norm2,
            block.feedforward,
        )
        self.p = block.dropout

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, (8,), self.norm1.weight, self.norm1.bias)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.attention.qkv(normed).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gathered = self.attention.out(mixed.transpose(1, 2).flatten(2))
        x = x + dropout(gathered, self.p, training=self.training)
        normed = F.layer_norm(x, (8,), self.norm2.weight, self.norm2.bias)
        worked = self.feedforward.down(F.gelu(self.feedforward.up(normed)))
        return x + dropout(worked, self.p, training=self.training)


@pytest.mark.parametrize("feedforward", ["mlp", "fused_mlp"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_it_is_its_formula(feedforward: str, p: float) -> None:
    heads = Choice("multi_head", {"num_heads": 2})
    block = randomise(PreNormBlock(8, attention=heads, feedforward=feedforward, dropout=p))
    x = torch.randn(3, 5, 8)
    assert_same_step(WrittenOut(block), block, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(block.eval()(x), WrittenOut(block).eval()(x), rtol=1e-4, atol=1e-4)


def test_rotation_and_padding_reach_the_attention() -> None:
    block = randomise(PreNormBlock(8, attention=Choice("multi_head", {"num_heads": 2}), causal=False))
    x = torch.randn(2, 5, 8)
    plain = block(x)
    assert not torch.allclose(block(x, rotate=lambda q, k: (2 * q, k)), plain, atol=1e-3)
    real_BT = torch.ones(2, 5, dtype=torch.bool)
    real_BT[0, 3:] = False
    padded = block(x, key_padding_mask=real_BT)
    torch.testing.assert_close(padded[0, :3], block(x[:1, :3])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded[1], plain[1], rtol=1e-4, atol=1e-4)
