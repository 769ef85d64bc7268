"""The contract of every attention other than multi_head: its formula, its errors and its memory."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components import FourierMix, MultiHeadAttention, TransformerBlock, create, get
from fuselayers.components.registry import Choice
from fuselayers.partition import saved_bytes
from tests.components.attention import reference
from tests.components.attention.contract import HEADS, HIDDEN_DIM, assert_is, small

OPTIONS: dict[str, dict[str, Any]] = {
    "favor": {"num_heads": HEADS, "num_features": 5},
    "linear": {"num_heads": HEADS},
    "local": {"num_heads": HEADS, "window": 3},
    "linformer": {"num_heads": HEADS, "projected_length": 5, "context_length": 131},
    "nystrom": {"num_heads": HEADS, "num_landmarks": 3},
    "pooling": {"window": 3},
    "fourier_mix": {},
}
CAUSAL = ["favor", "linear", "local", "pooling"]
WITH_HEADS = [name for name, options in OPTIONS.items() if "num_heads" in options]
GROUPED = {"num_kv_heads": 2, "bias": False}
MEMORY = torch.zeros(4, 9, HIDDEN_DIM)


def made(name: str, **options: Any) -> nn.Module:
    return small(get("attention", name)(HIDDEN_DIM, **{**OPTIONS[name], **options}))


# Sums over keys run in chunks of 64 tokens, and local attention in blocks as long as the window: a single block, whole
# blocks and a shorter last block differ in masks. A window lies inside the text, is cut at its ends, or is wider.
CASES: list[tuple[str, dict[str, Any], int]] = [
    *(
        (name, {"causal": causal}, tokens)
        for name in ("favor", "linear")
        for causal in (True, False)
        for tokens in (1, 7, 129)
    ),
    *(
        ("local", {"causal": causal, "window": window}, tokens)
        for causal in (True, False)
        for tokens, window in ((1, 3), (7, 1), (7, 2), (7, 7), (7, 50), (129, 16), (129, 43))
    ),
    *(
        ("pooling", {"causal": causal, "window": window}, tokens)
        for causal in (True, False)
        for tokens, window in ((1, 3), (7, 1), (7, 2), (7, 3), (7, 50), (129, 50))
    ),
    *(("linformer", {}, tokens) for tokens in (1, 7, 129, 131)),
    *(("nystrom", {}, tokens) for tokens in (1, 2, 7, 129)),
    ("nystrom", {"conv_kernel_size": 5, "num_landmarks": 4, "inverse_iterations": 2}, 7),
    *(("fourier_mix", {}, tokens) for tokens in (1, 7, 129)),
]


# Two of the eight ways to combine padding, rotation and grouped heads: none of them, and all.
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(("name", "options", "tokens"), CASES)
def test_values_and_gradients(name: str, options: dict[str, Any], tokens: int, everything: bool) -> None:
    inputs: tuple[str, ...] = ("key_padding_mask",) if everything else ()
    if everything and name in WITH_HEADS:
        options, inputs = {**options, **GROUPED}, ("key_padding_mask", "rotate")
        inputs += ("documents",) if name == "local" else ()
    assert_is(made(name, **options), getattr(reference, name), inputs, tokens=tokens)


# The memory has 9 tokens; x has fewer or more, so that either side can be the longer.
@pytest.mark.parametrize(("tokens", "inputs"), [(1, ["key_padding_mask"]), (7, []), (12, ["key_padding_mask"])])
@pytest.mark.parametrize(("name", "options"), [("favor", {}), ("nystrom", {"inverse_iterations": 3})])
def test_a_memory(name: str, options: dict[str, Any], tokens: int, inputs: list[str]) -> None:
    assert_is(made(name, num_kv_heads=2, **options), getattr(reference, name), inputs, tokens=tokens, memory=9)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("attention", "multi_head", {"num_heads": HEADS}),
        *(("attention", name, OPTIONS[name]) for name in CAUSAL),
        ("feedforward", "conv_mlp", {}),
        ("block", "transformer", {}),
        ("block", "reversible", {}),
    ],
)
def test_made_by_hand_it_sees_later_tokens(kind: str, name: str, options: dict[str, Any]) -> None:
    heads = {"attention": Choice("multi_head", {"num_heads": HEADS})} if kind == "block" else {}
    layer = small(create(kind, Choice(name, options), HIDDEN_DIM, **heads))
    x = torch.randn(1, 4, HIDDEN_DIM)
    later = x.clone()
    later[:, 2] = torch.randn(HIDDEN_DIM)
    assert not torch.allclose(layer(later)[:, 1], layer(x)[:, 1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {"causal": True}),
        ("local", {"causal": True, "dropout": 0.3}),
        ("linformer", {"context_length": 1024, "dropout": 0.3}),
        ("nystrom", {"conv_kernel_size": 3}),
    ],
)
def test_the_memory_of_backward_grows_with_the_tokens(name: str, options: dict[str, Any]) -> None:
    layer = made(name, num_kv_heads=2, **options)
    few, many = (saved_bytes(layer, torch.randn(1, tokens, HIDDEN_DIM)) for tokens in (256, 1024))
    assert many < 4.2 * few


def test_backward_of_fourier_mix_keeps_nothing() -> None:
    assert saved_bytes(FourierMix(HIDDEN_DIM), torch.randn(1, 16, HIDDEN_DIM, requires_grad=True)) == 0


# Each class is public and checks its heads in its own __init__.
@pytest.mark.parametrize("attention", [MultiHeadAttention, *(get("attention", name) for name in WITH_HEADS)])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 5}, "hidden_dim must be a multiple of num_heads, got 12 and 5; or give head_dim"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
    ],
)
def test_errors_of_heads(attention: type[nn.Module], options: dict[str, Any], text: str) -> None:
    arguments = {**options, "context_length": 9} if attention is get("attention", "linformer") else options
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        attention(HIDDEN_DIM, **arguments)


def test_an_even_convolution() -> None:
    text = "conv_kernel_size must be odd where the convolution is not causal, got 4; use 5"
    with pytest.raises(ValueError, match=f"^{text}$"):
        made("nystrom", conv_kernel_size=4)


@pytest.mark.parametrize(
    ("name", "options", "inputs", "text"),
    [
        (
            *("linformer", {"context_length": 6}, {}),
            "a sequence of 7 tokens does not fit the context_length 6; "
            "shorten it, or build the attention with a longer context",
        ),
        (
            *("favor", {"causal": True}, {"memory": MEMORY}),
            "causal attention takes no memory; build it with causal=False",
        ),
        (
            *("nystrom", {"conv_kernel_size": 3}, {"memory": MEMORY}),
            "attention with a convolution of the values takes no memory; leave conv_kernel_size out",
        ),
        ("favor", {}, {"memory": MEMORY[:1]}, "memory must be [4, S, 12], got [1, 9, 12]"),
        (
            *("nystrom", {}, {"memory": MEMORY, "key_padding_mask": torch.ones(4, 7, dtype=torch.bool)}),
            "key_padding_mask must be torch.bool [4, 9] to fit the memory [4, 9, 12], True for a real token, "
            "got torch.bool [4, 7]",
        ),
    ],
)
def test_errors_of_a_call(name: str, options: dict[str, Any], inputs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made(name, **options)(torch.zeros(4, 7, HIDDEN_DIM), **inputs)


def test_a_causal_block_takes_no_attention_that_mixes_queries() -> None:
    options: dict[str, Any] = {"attention": Choice("multi_head", {"num_heads": 2})}
    options["cross_attention"] = Choice("nystrom", {"num_heads": 2})
    text = (
        "cross_attention 'nystrom' mixes the queries of all tokens, so a later token would change an earlier one; "
        "use another cross_attention, such as 'multi_head'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        TransformerBlock(8, causal=True, **options)
    TransformerBlock(8, **options)  # takes it if not causal
