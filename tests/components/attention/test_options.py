"""Every option and input of multi-head attention, alone and with others, on every kernel."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from fuselayers.components import MultiHeadAttention, RotaryPosition
from fuselayers.ops import dropout
from tests.components.attention.contract import HEADS, HIDDEN_DIM, INPUTS, TOKENS, assert_is, made
from tests.components.attention.reference import multi_head

OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2},
    "one kv head": {"num_kv_heads": 1, "head_dim": 4},
    "no bias": {"bias": False},
    "out bias": {"bias": False, "out_bias": True},
    "no out bias": {"out_bias": False},
    "window": {"window": 3},
    "qk_norm": {"qk_norm": "rms_norm", "qk_norm_eps": 0.1},
    "soft_cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.3},
    "both ways": {"causal": False},
}


PAIRS = [
    *((name,) for name in OPTIONS),
    *(pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) != {"grouped", "one kv head"}),
]
# The inputs take turns: each pair of options gets the next of them. Padding leaves tokens with nothing to look at.
CASES = [(pair, ((), *((name,) for name in INPUTS), INPUTS)[number % 7]) for number, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("names", "inputs"), CASES, ids=str)
def test_options_and_inputs_together(names: tuple[str, ...], inputs: tuple[str, ...]) -> None:
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    assert_is(made(**options), multi_head, inputs, kernels=("auto", "plain"))


def test_the_kernel_of_torch_takes_documents() -> None:
    assert_is(made(), multi_head, ("documents",), kernels=("sdpa",))


# Padding and a bias with a mask become different kinds of masks. The options change the kernel that takes them.
@pytest.mark.parametrize("inputs", [(), ("key_padding_mask",), ("distance_bias", "mask")], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "sinks": True}, {"qk_norm": "rms_norm", "soft_cap": 0.7}])
def test_cross_attention(options: dict[str, Any], inputs: tuple[str, ...]) -> None:
    assert_is(made(causal=False, **options), multi_head, inputs, kernels=("auto", "plain"), memory=5)


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "causal": False}, {"soft_cap": 0.7}, {"sinks": True, "window": 3}]
)
def test_dropout_falls_on_the_probabilities_of_the_keys(options: dict[str, Any]) -> None:
    layer = made(dropout=0.4, **options)
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    torch.manual_seed(2)
    kept = dropout(torch.ones(2, HEADS, TOKENS, TOKENS, dtype=torch.float64), 0.4)
    torch.manual_seed(2)
    torch.testing.assert_close(layer(x), multi_head(layer, x, kept=kept))
    torch.testing.assert_close(layer.eval()(x), multi_head(layer, x))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"qk_norm": "rms"}, "no norm 'rms'; did you mean 'rms_norm'?"),
        ({"kernel": "sdp"}, "no kernel 'sdp'; did you mean 'sdpa'? there are: auto, flex, plain, sdpa"),
        (
            {"kernel": "flex", "dropout": 0.1},
            "the kernel 'flex' cannot drop probabilities; use 'auto' or 'plain', or dropout=0",
        ),
        (
            {"kernel": "sdpa", "soft_cap": 1.0},
            "the kernel 'sdpa' cannot cap scores; use 'auto', or leave soft_cap out",
        ),
    ],
)
def test_errors_of_the_constructor(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        MultiHeadAttention(HIDDEN_DIM, num_heads=HEADS, **options)


@pytest.mark.parametrize(
    ("options", "inputs", "text"),
    [
        (
            {},
            {"distance_bias": torch.zeros(6, 3)},
            "distance_bias must be [6, 5], for each head the distances of 3 queries and 3 keys, got [6, 3]",
        ),
        (
            {},
            {"mask": torch.ones(2, 3, 3)},
            "mask must be torch.bool, True where a query may look at a key, got torch.float32",
        ),
        (
            {},
            {"mask": create_block_mask(lambda b, h, t, s: t >= s, None, None, 3, 3, device="cpu")},
            "a BlockMask needs the kernel 'flex', got 'auto'; set kernel='flex', or pass a tensor",
        ),
        (
            {"kernel": "flex"},
            {"mask": create_block_mask(lambda b, h, t, s: t >= s, None, None, 3, 4, device="cpu")},
            "a BlockMask must be for [3, 3] tokens, got [3, 4]",
        ),
        (
            {"window": 2},
            {"memory": torch.zeros(2, 4, 12)},
            "attention with a window takes no memory; build it without window=",
        ),
        (
            {},
            {"memory": torch.zeros(2, 4, 12), "rotate": RotaryPosition().rotate},
            "rotate is for queries and keys of the same tokens; leave it out with a memory",
        ),
        (
            {"kernel": "flex"},
            {
                "mask": create_block_mask(lambda b, h, t, s: t >= s, None, None, 3, 3, device="cpu"),
                "documents": torch.zeros(2, 3, dtype=torch.int64),
            },
            "documents cannot be added to a BlockMask; put the documents into the BlockMask",
        ),
        (
            {},
            {"memory": torch.zeros(2, 4, 12), "documents": torch.zeros(2, 4, dtype=torch.int64)},
            "documents are for queries and keys of the same tokens; leave them out with a memory",
        ),
        (
            {},
            {"documents": torch.zeros(2, 4, dtype=torch.int64)},
            "documents must be integers [2, 3], the number of each key's document, got torch.int64 [2, 4]",
        ),
        (
            {},
            {"key_padding_mask": torch.ones(2, 3)},
            "key_padding_mask must be torch.bool [2, 3] to fit x [2, 3, 12], True for a real token, "
            "got torch.float32 [2, 3]",
        ),
    ],
)
def test_errors_of_a_call(options: dict[str, Any], inputs: dict[str, Any], text: str) -> None:
    layer = MultiHeadAttention(HIDDEN_DIM, num_heads=HEADS, **options)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        layer(torch.zeros(2, 3, HIDDEN_DIM), **inputs)


def test_sequences_without_tokens() -> None:
    text = f"x must have at least one token to mix, got [2, 0, {HIDDEN_DIM}]; leave empty sequences out"
    for kernel in ("sdpa", "plain"):
        layer = MultiHeadAttention(HIDDEN_DIM, num_heads=6, num_kv_heads=2, kernel=kernel)
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            layer(torch.zeros(2, 0, HIDDEN_DIM))
        layer(torch.zeros(0, 3, HIDDEN_DIM)).sum().backward()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())
