import functools

import pytest
import torch
import torch.nn.functional as F

from fuselayers.components import Choice, Encoder
from fuselayers.ops import dropout
from fuselayers.partition import fuse
from tests.components.compare import assert_same_values, run
from tests.components.model.small import made, tokens


@pytest.mark.parametrize(("p", "tied"), [(0.0, True), (0.3, False)])
def test_it_is_embeddings_blocks_and_head(p: float, tied: bool) -> None:
    model = made(Encoder, dropout=p, tie_embeddings=tied)
    with torch.no_grad():
        model.bias.normal_()
    tokens_BT, segments_BT = tokens(3, 6), torch.randint(2, (3, 6))
    torch.manual_seed(1)
    x = model.token.weight[tokens_BT] + model.position.table.weight + model.segment.weight[segments_BT]
    x = dropout(F.layer_norm(x, (8,), model.embedding_norm.weight, model.embedding_norm.bias), p)
    for block in model.blocks:
        x = block(x)
    x = F.gelu(x @ model.head_dense.weight.T + model.head_dense.bias)
    x = F.layer_norm(x, (8,), model.head_norm.weight, model.head_norm.bias)
    expected = x @ (model.token.weight if tied else model.head.weight).T + model.bias
    torch.manual_seed(1)
    torch.testing.assert_close(model(tokens_BT, segments_BT=segments_BT), expected)


def test_padding_changes_nothing_for_real_tokens() -> None:
    model = made(Encoder)
    tokens_BT = tokens(2, 6)
    real_BT = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    got = model(tokens_BT, key_padding_mask=real_BT)
    torch.testing.assert_close(got[0], model(tokens_BT[:1])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1, :4], model(tokens_BT[1:, :4])[0], rtol=1e-4, atol=1e-4)


def test_fused_is_plain() -> None:
    heads = Choice("multi_head", {"num_heads": 2, "dropout": 0.2})
    plain = made(Encoder, num_layers=1, attention=heads, feedforward="fused_mlp", dropout=0.2)
    fused = fuse(plain, backend="eager", fallback=(), fullgraph=True)
    arguments = {
        "targets_BT": tokens(3, 6),
        "segments_BT": torch.randint(2, (3, 6)),
        "key_padding_mask": torch.arange(6) < torch.tensor([[6], [4], [1]]),
    }
    inputs = [tokens(3, 6)]
    expected, got = (run(plain, inputs, call=functools.partial(model, **arguments)) for model in (plain, fused))
    assert_same_values(expected, got, rtol=1e-4, atol=1e-5)
