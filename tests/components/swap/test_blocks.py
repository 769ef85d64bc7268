import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fuselayers.components.swap import fallbacks, swap, unswap
from fuselayers.partition import FallbackWarning, saved_bytes
from tests.components.swap.models import FAMILIES, batch_for, loss_of

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("vit", "eager"),
        *(pytest.param(name, "auto", marks=pytest.mark.slow) for name in ("llama", "gpt2", "bert")),
    ],
)
def test_blocks_share_a_graph(name: str, backend: str) -> None:
    model, batch = FAMILIES[name][0]().eval(), batch_for(name)
    expected = loss_of(model, batch)
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    report = swap(model, level="blocks", backend=backend, batch=batch)
    blocks = [site for site in report.sites if site.rules == ("block",)]
    assert len(blocks) == 2
    assert report.skipped == ()
    loss = loss_of(model, batch)
    torch.testing.assert_close(loss, expected)
    got = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for one, wanted in zip(got, gradients, strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-6, rtol=1e-3)
    if name != "vit":
        counters.clear()
        loss_of(model.train(), batch_for(name, tokens=7)).backward()
        loss_of(model, batch_for(name, tokens=9)).backward()
        # Training is a mode of its own, one graph for both blocks and all lengths.
        assert counters["stats"]["unique_graphs"] <= 1, "another length is compiled again"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(one) for one in other.modules()] == [type(one) for one in model.modules()]
    unswap(model)
    torch.testing.assert_close(loss_of(model.eval(), batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "most"), [("gpt2", 12, 0.35), ("bert", 12, 0.55), ("llama", 32, 0.55), ("vit", 12, 0.65)]
)
def test_fewer_bytes_are_saved(name: str, tokens: int, most: float) -> None:
    # With 24 tokens of 32 values Llama saves 0.58: the gradient of its logits, for 99 words, is as large as its states.
    model, batch = FAMILIES[name][0]().train(), batch_for(name, tokens)
    before = saved_bytes(model, **batch)
    swap(model, level="blocks", verify=False)
    assert saved_bytes(model, **batch) <= most * before


def _decoder(layers: int = 4) -> Any:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=99))


def test_a_model_that_fills_a_cache_in_training_has_one_graph_too() -> None:
    plain, model = _decoder().train(), _decoder().train()
    swap(model, level="blocks", backend="eager", verify=False)
    counters.clear()
    for tokens in (12, 7):
        batch = batch_for("llama", tokens)
        results = [one(**batch) for one in (plain, model)]
        torch.testing.assert_close(results[1].loss, results[0].loss)
        for entry, wanted in zip(results[1].past_key_values.layers, results[0].past_key_values.layers, strict=True):
            torch.testing.assert_close(entry.keys, wanted.keys)
            torch.testing.assert_close(entry.values, wanted.values)
    gradients = [
        torch.autograd.grad(one.loss, [*kind.parameters()]) for one, kind in zip(results, (plain, model), strict=True)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert fallbacks(model) == ()
    # A filled cache is continued by the block's own forward.
    token = {"input_ids": torch.tensor([[5], [6]])}
    with pytest.warns(
        FallbackWarning, match="its past_key_values is a cache that it fills in a way of its own; in training, use_"
    ):
        again = model(**token, past_key_values=results[1].past_key_values).logits
    torch.testing.assert_close(again, plain(**token, past_key_values=results[0].past_key_values).logits)
    assert counters["stats"]["unique_graphs"] == 1
    assert [one.kind for one in fallbacks(model)] == ["LlamaDecoderLayer"] * 4


class _Attention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.key = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, past_key_value: Any) -> tuple[torch.Tensor, Any]:
        key = self.key(x)[:, None]
        past_key_value.update(key, 2 * key, self.layer_idx)
        return key[:, 0], past_key_value


class _Returning(nn.Module):
    """A block in the style of transformers before version 4.56, which returns its cache."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.attention = _Attention(number)

    def forward(self, x: torch.Tensor, past_key_value: Any = None) -> tuple[torch.Tensor, Any]:
        y, present = self.attention(x, past_key_value)
        return x + y, present


class _Shifted(_Attention):
    def forward(self, x: torch.Tensor, past_key_value: Any) -> tuple[torch.Tensor, Any]:
        key = self.key(x)[:, None]
        past_key_value.update(key, 2 * key, self.layer_idx + 1)
        return key[:, 0], past_key_value


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Returning(0), _Returning(1)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        cache = transformers.DynamicCache()
        for block in self.blocks:
            x, cache = block(x, past_key_value=cache)
        return x, cache


@pytest.mark.parametrize("shifted", [False, True])
def test_a_block_that_returns_its_cache_returns_the_callers(shifted: bool) -> None:
    model = _Stack()
    if shifted:  # it writes under another number than its own, so that its own forward has to run
        for number, block in enumerate(model.blocks):
            block.attention = _Shifted(number)
    plain = copy.deepcopy(model)
    swap(model, level="blocks", backend="eager", verify=False)
    x = torch.randn(2, 3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        (got, cache), (wanted, other) = model(x), plain(x)
    torch.testing.assert_close(got, wanted)
    assert type(cache) is transformers.DynamicCache
    assert len(fallbacks(model)) == (2 if shifted else 0)
    for entry, expected in zip(cache.layers, other.layers, strict=True):
        assert entry.is_initialized == expected.is_initialized
        if entry.is_initialized:
            torch.testing.assert_close((entry.keys, entry.values), (expected.keys, expected.values))


def test_a_compiler_sees_the_blocks_own_forward() -> None:
    model, batch = _decoder(2).train(), batch_for("llama")
    swap(model, level="blocks", backend="eager", verify=False)
    counters.clear()
    torch.compile(model, backend="eager")(**batch).loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_fixed_cache_is_filled_by_the_blocks_own_forward() -> None:
    plain, model = _decoder(2).train(), _decoder(2).train()
    swap(model, level="blocks", backend="eager", verify=False)
    batch = batch_for("llama")
    caches = [transformers.StaticCache(config=plain.config, max_cache_len=16) for _ in range(2)]
    wanted = plain(**batch, past_key_values=caches[0]).loss
    with pytest.warns(FallbackWarning, match="is a cache that it fills in a way of its own"):
        torch.testing.assert_close(model(**batch, past_key_values=caches[1]).loss, wanted)


def test_generate_runs_the_blocks_own_forward() -> None:
    model, batch = FAMILIES["llama"][0]().eval(), batch_for("llama")
    tokens = model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    swap(model, level="blocks", verify=False)
    counters.clear()
    again = model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    assert torch.equal(tokens, again)
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
def test_blocks_pass_the_verification_with_many_rows() -> None:
    model = FAMILIES["gpt2"][0]()
    ids = torch.randint(3, 99, (16, 128))
    report = swap(model, level="blocks", batch={"input_ids": ids, "labels": ids})
    assert report.skipped == ()
    assert [site.rules for site in report.sites].count(("block",)) == 2
