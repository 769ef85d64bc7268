"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from typing import Any, Final

from .family import Family, Key
from .fields import Fields
from .llama import FAMILY as LLAMA
from .llama import REPEATED, llama_like

FAMILY: Final = Family(
    keys=(
        *LLAMA.keys,
        *(Key(f"model.layers.{{}}.self_attn.{part}_proj.bias", "blocks.{}.attention.qkv.bias") for part in "qkv"),
    ),
    repeated=REPEATED,
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("use_sliding_window", False)
    config = llama_like(fields)
    fields.require("layer_types", ["full_attention"] * config["model"]["num_layers"])
    config["feedforward"]["activation"] = fields.activation("hidden_act", "silu")
    return config
