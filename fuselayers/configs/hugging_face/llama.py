"""Llama and Mistral, whose weights have the same names, and what their descendants share with them."""

from typing import Any, Final

from .family import Family, Key
from .fields import Fields
from .rotary import rotary

LAYER: Final = (
    Key("model.embed_tokens.weight", "token.weight"),
    *(Key(f"model.layers.{{}}.self_attn.{part}_proj.weight", "blocks.{}.attention.qkv.weight") for part in "qkv"),
    Key("model.layers.{}.self_attn.o_proj.weight", "blocks.{}.attention.out.weight"),
    Key("model.layers.{}.input_layernorm.weight", "blocks.{}.residual.norms.0.weight"),
    Key("model.norm.weight", "norm.weight"),
    Key("lm_head.weight", "head.weight"),
)
GATED: Final = tuple(
    Key(f"model.layers.{{}}.mlp.{name}_proj.weight", f"blocks.{{}}.feedforward.{name}.weight")
    for name in ("gate", "up", "down")
)
SECOND_NORM: Final = (Key("model.layers.{}.post_attention_layernorm.weight", "blocks.{}.residual.norms.1.weight"),)
REPEATED: Final = {"lm_head.weight": "model.embed_tokens.weight"}

FAMILY: Final = Family(
    keys=(*LAYER, *SECOND_NORM, *GATED),
    repeated=REPEATED,
    # The speeds of rotary positions, which older versions stored.
    skipped=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    config = llama_like(fields)
    config["feedforward"]["activation"] = fields.activation("hidden_act", "silu")
    return config


def read_mistral(fields: Fields) -> dict[str, Any]:
    fields.require("layer_types", None)
    config = llama_like(fields)
    config["feedforward"]["activation"] = fields.activation("hidden_act", "silu")
    config["attention"]["window"] = fields.optional("sliding_window", 4096)
    return config


def llama_like(fields: Fields, *, base: float = 10000.0, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    """Return the config that Llama and its descendants share."""
    num_heads = fields.get("num_attention_heads")
    context_length = fields.get("max_position_embeddings")
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.size("num_hidden_layers"),
            "context_length": context_length,
            "tie_embeddings": fields.get("tie_word_embeddings", tied),
        },
        "attention": {
            "num_heads": num_heads,
            "num_kv_heads": fields.get("num_key_value_heads", num_heads),
            "head_dim": fields.optional("head_dim"),
            "dropout": fields.get("attention_dropout", 0.0),
        },
        "feedforward": {"width": fields.get("intermediate_size")},
        "norm": {"eps": fields.get("rms_norm_eps", eps)},
        "position": rotary(fields, base=fields.get("rope_theta", base), context_length=context_length),
    }
