"""Qwen3: Llama with norms of each head's queries and keys."""

from typing import Any, Final

from .family import Family, Key
from .fields import Fields
from .llama import FAMILY as LLAMA
from .llama import REPEATED, llama_like

FAMILY: Final = Family(
    keys=(
        *LLAMA.keys,
        Key("model.layers.{}.self_attn.q_norm.weight", "blocks.{}.attention.q_norm.weight"),
        Key("model.layers.{}.self_attn.k_norm.weight", "blocks.{}.attention.k_norm.weight"),
    ),
    repeated=REPEATED,
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    config = llama_like(fields)
    num_layers = config["model"]["num_layers"]
    fields.require("layer_types", ["full_attention"] * num_layers)
    config["attention"] |= {"head_dim": fields.get("head_dim", 128), "qk_norm_eps": config["norm"]["eps"]}
    config["feedforward"]["activation"] = fields.activation("hidden_act", "silu")
    return config
