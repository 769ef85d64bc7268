import copy
import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers import fuse
from fuselayers.components import Choice, Decoder, KeyValueCache, RotaryPosition
from fuselayers.partition import fuse_in_place
from tests.components.attention.contract import HIDDEN_DIM, made

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_kv_heads": 2},
    {"window": 3},
    {"sinks": True, "num_kv_heads": 1},
    {"soft_cap": 0.7, "window": 2, "qk_norm": "rms_norm"},
    {"kernel": "plain"},
)


@pytest.mark.parametrize(
    ("options", "pieces"),
    # A piece of a single token has another mask. The options change scores and heads.
    [
        *((options, (3, 1, 2, 1)) for options in OPTIONS),
        ({}, (1,) * 7),
        ({"window": 3}, (6, 1)),
        ({"kernel": "flex", "window": 2, "sinks": True}, (3, 1, 3)),
    ],
    ids=str,
)
@torch.no_grad()
def test_piece_by_piece_is_as_all_at_once(options: dict[str, Any], pieces: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    layer, rotate = made(**options), RotaryPosition().rotate
    x, bias = torch.randn(2, 7, HIDDEN_DIM, dtype=torch.float64), torch.randn(6, 13, dtype=torch.float64)
    real_BS = torch.ones(2, 7, dtype=torch.bool)
    real_BS[1, :2] = False
    mask = torch.rand(2, 1, 7, 7) < 0.7
    expected = layer(x, rotate=rotate, distance_bias=bias, key_padding_mask=real_BS, mask=mask)
    cache, got = KeyValueCache(7), []
    for size in pieces:
        first, end = cache.length, cache.length + size
        got.append(
            layer(
                x[:, first:end],
                rotate=functools.partial(RotaryPosition().rotate, first=first),
                distance_bias=bias[:, 7 - end : 6 + size],
                key_padding_mask=real_BS[:, :end],
                mask=mask[:, :, first:end, :end],
                cache=cache,
            )
        )
        assert cache.length == end
    torch.testing.assert_close(torch.cat(got, dim=1), expected)


@torch.no_grad()
def test_a_cache_of_another_memory_is_refused() -> None:
    layer = made(causal=False, num_kv_heads=2)
    memory, x = (torch.randn(2, tokens, HIDDEN_DIM, dtype=torch.float64) for tokens in (5, 3))
    for rows, others in ((slice(2), slice(1)), (slice(1), slice(2))):
        cache = KeyValueCache()
        layer(x[rows], memory=memory[rows], cache=cache)
        before, now = len(x[rows]), len(x[others])
        text = (
            f"the cache holds torch.float64 [{before}, 2, T, 2], got torch.float64 [{now}, 2, 5, 2]; "
            "use a new cache for another batch or model"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            layer(x[others], memory=memory[others], cache=cache)
    with pytest.raises(ValueError, match=r"holds torch\.float64 \[1, 2, T, 2\], got torch\.float32 \[1, 2, 5, 2\]"):
        layer.float()(x[:1].float(), memory=memory[:1].float(), cache=cache)
    with pytest.raises(ValueError, match=r"^the cache holds a memory of 5 tokens, got a memory of 3; use a new cache$"):
        layer(x[:1].float(), memory=x[:1].float(), cache=cache)


def test_errors() -> None:
    cache, ones = KeyValueCache(4), torch.ones(2, 3, 3, 5)
    with pytest.raises(ValueError, match=r"^the cache is empty; append to it first$"):
        cache.stored()
    cache.append(ones, ones)
    text = "the cache has room for 4 tokens and holds 3, got 2 more; build it with a larger capacity"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        cache.append(ones[:, :, :2], ones[:, :, :2])
    text = (
        "the cache holds torch.float32 [2, 3, T, 5], got torch.float32 [1, 3, 1, 5]; "
        "use a new cache for another batch or model"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        cache.append(ones[:1, :, :1], ones[:1, :, :1])
    with pytest.raises(RuntimeError, match=r"^a KeyValueCache keeps no gradients; generate under torch\.no_grad\(\)$"):
        made()(torch.ones(1, 2, HIDDEN_DIM, dtype=torch.float64), cache=KeyValueCache(2))
    text = "a cache needs causal attention; build it with causal=True, or leave the cache out"
    with pytest.raises(ValueError, match=f"^{text}$"):
        made(causal=False)(torch.ones(1, 2, HIDDEN_DIM, dtype=torch.float64), cache=KeyValueCache(2))
    with pytest.raises(ValueError, match=r"^capacity must be at least 1, got 0$"):
        KeyValueCache(0)
    text = (
        "key_padding_mask must be torch.bool [1, 3] to fit x [1, 1, 12] after 2 tokens in the cache, True for a real "
        "token, got torch.bool [1, 1]"
    )
    cache, layer = KeyValueCache(3), made()
    x, real = torch.ones(1, 2, HIDDEN_DIM, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    with torch.no_grad():
        layer(x, cache=cache)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        layer(x[:, :1], key_padding_mask=real, cache=cache)


def decoder(**options: Any) -> Decoder:
    arguments: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_dim": HIDDEN_DIM,
        "num_layers": 2,
        "context_length": 9,
        "attention": Choice("multi_head", {"num_heads": 2}),
        "init_std": 0.5,
    }
    return Decoder(**(arguments | options)).double()


def generated_anew(model: Decoder, tokens: Tensor, num_tokens: int) -> Tensor:
    """Generate greedily by whole forward passes."""
    model.eval()
    for _ in range(num_tokens):
        logits = model(tokens[:, -model.context_length :])[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass through the blocks."""
    counts: list[int] = []
    run_blocks = Decoder.run_blocks

    def counted(self: Decoder, x_BTD: Tensor, **inputs: Any) -> Tensor:
        counts.append(x_BTD.shape[1])
        return run_blocks(self, x_BTD, **inputs)

    monkeypatch.setattr(Decoder, "run_blocks", counted)
    return counts


@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ({"num_heads": 2}, "learned"),
        ({"num_heads": 6, "num_kv_heads": 2}, "rotary"),
        ({"num_heads": 2, "window": 3, "sinks": True}, "none"),
        ({"num_heads": 2, "soft_cap": 3.0, "qk_norm": "rms_norm"}, "rotary"),
        ({"num_heads": 3}, "alibi"),
        ({"num_heads": 6, "num_kv_heads": 2}, "relative"),
    ],
    ids=str,
)
def test_generation_gives_the_tokens_it_gave_without_a_cache(
    attention: dict[str, Any], position: str, seen: list[int]
) -> None:
    model = decoder(attention=Choice("multi_head", attention), position=position, dropout=0.1)
    prompt = torch.randint(31, (3, 4))
    got = model.generate(prompt, 9, temperature=0)
    # Four tokens at once, then one per step until nine fill the context, then the last nine in each step.
    assert seen == [4, 1, 1, 1, 1, 1, 9, 9, 9]
    assert torch.equal(got, generated_anew(model, prompt, 9))


class MeanOfTokens(nn.Module):
    mixes_tokens = True

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-2)


class WithoutCache(nn.Module):
    def forward(self, x: Tensor, *, rotate: Any = None) -> Tensor:
        return x.cumsum(-2)


@pytest.mark.parametrize("part", ["feedforward", "block"])
def test_what_needs_all_tokens_gets_them(part: str, seen: list[int]) -> None:
    model = decoder()
    if part == "feedforward":
        model.blocks[1].feedforward = MeanOfTokens()
    else:
        model.blocks[1] = WithoutCache()
    prompt = torch.randint(31, (2, 3))
    got = model.generate(prompt, 3, temperature=0)
    assert seen == [3, 4, 5]
    assert torch.equal(got, generated_anew(model, prompt, 3))


def test_fused_models_generate_eagerly_and_stay_fused(seen: list[int]) -> None:
    model = decoder(dropout=0.1)
    prompt = torch.randint(31, (2, 3))
    expected = generated_anew(model, prompt, 4)
    by_block = copy.deepcopy(model)
    fuse_in_place(by_block.blocks, backend="eager", partition="min_cut")
    views = list(by_block.blocks)
    calls: list[int] = []
    views[0].register_forward_hook(lambda *_: calls.append(1))
    seen.clear()
    assert torch.equal(by_block.generate(prompt, 4, temperature=0), expected)
    assert (seen, len(calls)) == ([3, 1, 1, 1], 4)
    assert [view.report().graphs for view in views] == [(), ()]
    torch.testing.assert_close(by_block.eval()(prompt), model(prompt))
    whole = fuse(model, backend="eager")
    seen.clear()
    assert torch.equal(whole.generate(prompt, 4, temperature=0), expected)
    assert seen == [3, 1, 1, 1]
