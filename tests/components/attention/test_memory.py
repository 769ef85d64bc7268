"""Errors of the cross-attention of favor and nystrom."""

import re
from typing import Any

import pytest
import torch

from fuselayers.components import Choice, TransformerBlock, get
from tests.components.attention.contract import HIDDEN_DIM


@pytest.mark.parametrize(
    ("kind", "options", "inputs", "text"),
    [
        ("favor", {"causal": True}, {}, "causal attention takes no memory; build it with causal=False"),
        (
            *("nystrom", {"conv_kernel_size": 3}, {}),
            "attention with a convolution of the values takes no memory; leave conv_kernel_size out",
        ),
        ("favor", {}, {"memory": torch.zeros(1, 9, 12)}, "memory must be [4, S, 12], got [1, 9, 12]"),
        (
            *("nystrom", {}, {"key_padding_mask": torch.ones(4, 7, dtype=torch.bool)}),
            "key_padding_mask must be torch.bool [4, 9] to fit the memory [4, 9, 12], True for a real token, "
            "got torch.bool [4, 7]",
        ),
    ],
)
def test_errors_of_a_call(kind: str, options: dict[str, Any], inputs: dict[str, Any], text: str) -> None:
    layer = get("attention", kind)(HIDDEN_DIM, num_heads=6, num_kv_heads=2, **options)
    arguments = {"memory": torch.zeros(4, 9, HIDDEN_DIM), **inputs}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        layer(torch.zeros(4, 7, HIDDEN_DIM), **arguments)


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
