"""Llama, Mistral, Qwen2, Qwen2.5 and Qwen3, whose weights have the same names, and code that other families share."""

from typing import Any, Final

from .family import Family, Key
from .fields import Fields, grouped_heads, shared
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
    keys=(
        *LAYER,
        *SECOND_NORM,
        *GATED,
        # Only in Qwen2.
        *(Key(f"model.layers.{{}}.self_attn.{part}_proj.bias", "blocks.{}.attention.qkv.bias") for part in "qkv"),
        # Only in Qwen3.
        Key("model.layers.{}.self_attn.q_norm.weight", "blocks.{}.attention.q_norm.weight"),
        Key("model.layers.{}.self_attn.k_norm.weight", "blocks.{}.attention.k_norm.weight"),
    ),
    repeated=REPEATED,
    # The frequencies of rotary positions, which older versions stored.
    skipped=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    return llama_like(fields)


def read_mistral(fields: Fields) -> dict[str, Any]:
    fields.require("layer_types", None)
    config = llama_like(fields)
    config["attention"]["window"] = fields.optional("sliding_window", 4096)
    return config


def read_qwen2(fields: Fields) -> dict[str, Any]:
    fields.require("use_sliding_window", False)
    config = llama_like(fields)
    fields.require("layer_types", ["full_attention"] * config["model"]["num_layers"])
    return config


def read_qwen3(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    config = read_qwen2(fields)
    config["attention"] |= {"head_dim": fields.get("head_dim", 128), "qk_norm_eps": config["norm"]["eps"]}
    return config


def llama_like(fields: Fields, *, base: float = 10000.0, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    """Return the config that Llama and its descendants share."""
    config = shared(fields, tied=tied, activation=("hidden_act", "silu"))
    config["attention"] |= grouped_heads(fields)
    context_length = config["model"]["context_length"]
    position = rotary(fields, base=fields.get("rope_theta", base), context_length=context_length)
    return {**config, "norm": {"eps": fields.get("rms_norm_eps", eps)}, "position": position}
