"""Flex attention stays fused for many rules and sizes: no scores in memory, no wait."""

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fuselayers.components.attention import MultiHeadAttention
from fuselayers.errors import FallbackWarning
from tests.gpu.hollow.driver import counted

# Five rules and four sizes are more than Dynamo's limit of eight compilations of a function.
RULES: list[dict[str, Any]] = [
    {"window": 70},
    {"window": 90},
    {"soft_cap": 5.0},
    {"soft_cap": 7.0, "causal": True},
    {"sinks": True, "causal": True},
]


@functools.cache
def blocks(tokens: int) -> BlockMask:
    return create_block_mask(lambda b, h, t, s: t >= s, None, None, tokens, tokens, device="cuda")


def step(layer: torch.nn.Module, tokens: int) -> None:
    x_BTD = torch.zeros(2, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x_BTD, mask=blocks(tokens)).sum().backward()


@pytest.fixture
def layers() -> list[torch.nn.Module]:
    return [MultiHeadAttention(64, num_heads=2, kernel="flex", **rules).to("cuda", torch.bfloat16) for rules in RULES]


def test_many_rules_and_sizes_stay_fused(layers: list[torch.nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for tokens, layer in itertools.product((128, 200, 256, 512), layers):
            step(layer, tokens)
    for layer in layers:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        count = counted(lambda layer=layer: step(layer, 512))  # type: ignore[misc]
        assert count.waits == [0, 0], count.lines
        # Scores in float32 alone would be 4.2 MB.
        assert torch.cuda.max_memory_allocated() - before < 3e6


def test_it_says_once_that_a_call_was_not_fused(layers: list[torch.nn.Module]) -> None:
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(FallbackWarning) as caught:
        for _ in range(2):
            for tokens in (128, 200, 256):
                step(layers[0], tokens)
    said = [str(warning.message) for warning in caught if warning.category is FallbackWarning]
    assert said == [
        "flex attention runs torch's unfused formula, with all scores in memory: torch.compile is off, or reached "
        "its recompile limit for these rules; then raise torch._dynamo.config.recompile_limit"
    ]
