import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.components import Choice, Decoder
from fuselayers.components.model import sampling
from fuselayers.ops import dropout
from tests.components.model.small import made, tokens

LLAMA = {
    "attention": Choice("multi_head", {"num_heads": 4, "num_kv_heads": 2, "bias": False}),
    "feedforward": "gated_mlp",
    "norm": "rms_norm",
    "position": "rotary",
}


@pytest.mark.parametrize(("p", "tied"), [(0.0, True), (0.3, False)])
def test_it_is_embeddings_blocks_norm_and_head(p: float, tied: bool) -> None:
    model = made(Decoder, dropout=p, tie_embeddings=tied)
    tokens_BT = tokens(3, 6)
    torch.manual_seed(1)
    x = dropout(model.token.weight[tokens_BT] + model.position.table.weight, p)
    for block in model.blocks:
        x = block(x)
    x = F.layer_norm(x, (8,), model.norm.weight, model.norm.bias)
    expected = x @ (model.token.weight if tied else model.head.weight).T
    torch.manual_seed(1)
    torch.testing.assert_close(model(tokens_BT), expected)


def test_generate_is_reproducible_and_leaves_torchs_generator_alone() -> None:
    model = made(Decoder)
    prompt = tokens(2, 3)
    state = torch.get_rng_state()

    def generated(seed: int) -> Tensor:
        return model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed))

    first = generated(1)
    assert first.shape == (2, 23)
    assert torch.equal(first[:, :3], prompt)
    assert torch.equal(first, generated(1))
    assert not torch.equal(first, generated(2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    once = model.generate(prompt, 8)
    torch.manual_seed(5)
    assert torch.equal(model.generate(prompt, 8), once)
    assert torch.equal(model.generate(prompt, 8, top_k=1), model.generate(prompt, 8, temperature=0))
    assert model.generate(prompt.int(), 2).dtype == torch.int32
    assert torch.equal(model.generate(prompt, 0), prompt)


@pytest.mark.parametrize("options", [{}, LLAMA, {"position": "alibi"}], ids=str)
def test_prompts_that_are_padded_on_the_left_continue_as_each_by_itself(options: dict[str, object]) -> None:
    model = made(Decoder, **options)
    prompts = [tokens(1, 2), tokens(1, 4), tokens(1, 3)]
    prompt = torch.cat([torch.nn.functional.pad(row, (4 - row.shape[1], 0)) for row in prompts])
    real_BT = torch.arange(4) >= torch.tensor([[2], [0], [1]])
    # After some steps the padding has left the context of six tokens.
    got = model.generate(prompt, 9, temperature=0, key_padding_mask=real_BT)
    for row, alone in enumerate(prompts):
        expected = model.generate(alone, 9, temperature=0)
        assert torch.equal(got[row, -expected.shape[1] :], expected[0])
    with torch.no_grad():
        logits = model(prompt, key_padding_mask=real_BT)
        torch.testing.assert_close(logits[0, 2:], model(prompts[0])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens_per_look", [1, 3])
def test_a_row_ends_with_a_stop_token(tokens_per_look: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU checks less often than a CPU whether all rows have ended, and returns the same tokens."""
    monkeypatch.setitem(sampling.TOKENS_PER_LOOK, "cpu", tokens_per_look)
    model = made(Decoder)
    prompt = tokens(2, 3)
    free = model.generate(prompt, 8, temperature=0)
    stop = int(free[0, 5])
    got = model.generate(prompt, 8, temperature=0, stop_tokens=[stop])
    for row in range(2):
        written = free[row, 3:].tolist()
        end = written.index(stop) + 1 if stop in written else len(written)
        assert got[row, 3 : 3 + end].tolist() == written[:end]
        assert set(got[row, 3 + end :].tolist()) <= {stop}
    first_row = model.generate(prompt[:1], 8, temperature=0, stop_tokens=[stop, 0])
    assert (
        first_row.shape[1]
        == 3 + min(free[0, 3:].tolist().index(token) for token in (stop, 0) if token in free[0, 3:]) + 1
    )
    assert first_row[0, -1] in (stop, 0)


@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_documents_in_a_row_are_as_each_by_itself(position: str) -> None:
    model = made(Decoder, position=position).double()
    row = tokens(1, 6)
    together = model(row, document_ids=torch.tensor([[3, 3, 3, 5, 5, 5]]))
    alone = torch.cat((model(row[:, :3]), model(row[:, 3:])), dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(row), alone)
    only_itself = model(row, mask=torch.eye(6, dtype=torch.bool), document_ids=torch.zeros(1, 6, dtype=torch.int64))
    by_token = torch.cat([model(row[:, t : t + 1]) for t in range(6)], dim=1)
    torch.testing.assert_close(only_itself, by_token, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["multi_head", "local"])
def test_documents_save_their_numbers_and_no_mask(name: str) -> None:
    heads = Choice(name, {"num_heads": 2, "window": 50})
    model = made(Decoder, attention=heads, hidden_dim=64, context_length=300, position="none", dropout=0.1).train()
    row, document_ids = tokens(1, 300), torch.arange(300)[None] // 40
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(row, document_ids=document_ids)
    assert not any(x.shape[-2:] == (300, 300) for x in saved)
    assert sum(x.dtype == torch.int64 and x.shape == (1, 300) for x in saved) >= 2
    model.eval()
    alone = torch.cat([model(part) for part in row.split(40, dim=1)], dim=1)
    torch.testing.assert_close(model(row, document_ids=document_ids), alone, rtol=1e-4, atol=1e-4)


def test_an_attention_that_takes_no_documents_says_so() -> None:
    model = made(Decoder, attention=Choice("linear", {"num_heads": 2}))
    with pytest.raises(
        ValueError, match=r"^attention 'linear' cannot use documents; it takes key_padding_mask, rotate$"
    ):
        model(tokens(1, 6), document_ids=torch.zeros(1, 6, dtype=torch.int64))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_tokens": -1}, "num_tokens must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        (
            {"key_padding_mask": torch.tensor([[True, False]])},
            "key_padding_mask must be False only before the first real token of a row: prompts are padded on the left",
        ),
        (
            {"key_padding_mask": torch.ones(1, 2)},
            "key_padding_mask must be torch.bool [1, 2] like tokens, got torch.float32 [1, 2]",
        ),
    ],
)
def test_errors_of_generate(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made(Decoder).generate(tokens(1, 2), **{"num_tokens": 1, **arguments})
