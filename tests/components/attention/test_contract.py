"""The contract of every attention other than multi_head, besides its formula."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components import MultiHeadAttention, create, get
from fuselayers.components.registry import Choice
from fuselayers.partition import saved_bytes
from tests.components.attention.contract import HIDDEN_DIM, small

OPTIONS: dict[str, dict[str, Any]] = {
    "favor": {"num_heads": 6, "num_kv_heads": 2, "num_features": 5},
    "linear": {"num_heads": 6, "num_kv_heads": 2},
    "local": {"num_heads": 6, "num_kv_heads": 2, "window": 3},
    "linformer": {"num_heads": 6, "num_kv_heads": 2, "projected_length": 5},
    "nystrom": {"num_heads": 6, "num_kv_heads": 2, "num_landmarks": 3, "conv_kernel_size": 3},
    "pooling": {"window": 3},
}
CAUSAL = ["favor", "linear", "local", "pooling"]
WITH_HEADS = [name for name, options in OPTIONS.items() if options.get("num_heads")]


def made(name: str, *, context_length: int = 131, **options: Any) -> nn.Module:
    built_in = {"context_length": context_length} if name == "linformer" else {}
    built_in |= {"causal": True} if name in CAUSAL else {}
    return small(create("attention", Choice(name, {**OPTIONS[name], **options}), HIDDEN_DIM, **built_in))


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("attention", "multi_head", {"num_heads": 6}),
        *(("attention", name, OPTIONS[name]) for name in CAUSAL),
        ("feedforward", "conv_mlp", {}),
        ("block", "transformer", {}),
        ("block", "reversible", {}),
    ],
)
def test_made_by_hand_it_sees_later_tokens(kind: str, name: str, options: dict[str, Any]) -> None:
    heads = {"attention": Choice("multi_head", {"num_heads": 6})} if kind == "block" else {}
    layer = small(create(kind, Choice(name, options), HIDDEN_DIM, **heads))
    x = torch.randn(1, 4, HIDDEN_DIM)
    later = x.clone()
    later[:, 2] = torch.randn(HIDDEN_DIM)
    assert not torch.allclose(layer(later)[:, 1], layer(x)[:, 1])


@pytest.mark.parametrize("name", ["linear", "local", "linformer", "nystrom"])
def test_the_memory_of_backward_grows_with_the_tokens(name: str) -> None:
    options = {"dropout": 0.3} if name in ("local", "linformer") else {}
    layer = made(name, context_length=1024, **options)
    few, many = (saved_bytes(layer, torch.randn(1, tokens, HIDDEN_DIM)) for tokens in (256, 1024))
    assert many < 4.2 * few


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
