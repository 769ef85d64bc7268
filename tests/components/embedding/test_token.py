import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import TokenEmbedding
from tests.components.compare import run


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("hidden_dim", [1, 7, 16])
def test_rows_of_the_table_and_their_gradient(hidden_dim: int, scale: bool) -> None:
    layer = TokenEmbedding(5, hidden_dim, scale=scale).double()
    tokens = torch.tensor([[4, 0, 4], [1, 1, 1]])
    factor = hidden_dim**0.5 if scale else 1.0

    class WrittenOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = layer.weight

        def forward(self, tokens: Tensor) -> Tensor:
            chosen = (tokens[..., None] == torch.arange(5)).double()
            return chosen @ self.weight * factor

    got, expected = run(layer, [tokens]), run(WrittenOut(), [tokens])
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


def test_it_is_transformers_gemma() -> None:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    theirs = gemma.Gemma3TextScaledWordEmbedding(11, 12, padding_idx=0, embed_scale=12**0.5)
    ours = TokenEmbedding(11, 12, scale=True)
    ours.load_state_dict({"weight": theirs.weight})
    tokens = torch.randint(11, (3, 5))
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_bfloat16_meta_compile_and_copies() -> None:
    layer = TokenEmbedding(5, 8, scale=True)
    tokens = torch.tensor([[4, 0, 4]])
    expected = layer(tokens)
    half = copy.deepcopy(layer).bfloat16()(tokens)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, expected.bfloat16(), rtol=2**-7, atol=0)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(tokens), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(tokens), expected, rtol=0, atol=0)
    with torch.device("meta"):
        empty = TokenEmbedding(5, 8, scale=True)
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    torch.testing.assert_close(empty(tokens), expected, rtol=0, atol=0)


def test_names_and_errors() -> None:
    assert list(TokenEmbedding(5, 8).state_dict()) == ["weight"]
    with pytest.raises(ValueError, match=r"^vocab_size must be at least 1, got 0$"):
        TokenEmbedding(0, 8)
    with pytest.raises(ValueError, match=r"^hidden_dim must be at least 1, got 0$"):
        TokenEmbedding(5, 0)
