"""Gemma 2: norms on both sides of each sublayer, attention windows in some layers, soft caps."""

from typing import Any, Final

from ...names import shown
from .family import Family, Key
from .fields import Fields
from .llama import GATED, LAYER, REPEATED, llama_like

FAMILY: Final = Family(
    keys=(
        *LAYER,
        *GATED,
        Key("model.layers.{}.post_attention_layernorm.weight", "blocks.{}.residual.norms.1.weight"),
        Key("model.layers.{}.pre_feedforward_layernorm.weight", "blocks.{}.residual.norms.2.weight"),
        Key("model.layers.{}.post_feedforward_layernorm.weight", "blocks.{}.residual.norms.3.weight"),
    ),
    repeated=REPEATED,
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    fields.require("use_bidirectional_attention", False)
    config = llama_like(fields, tied=True)
    num_layers, window = config["model"]["num_layers"], fields.optional("sliding_window", 4096)
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    kinds = fields.get("layer_types", alternating)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not {"full_attention", "sliding_attention"}.issuperset(kinds)
    ):
        raise ValueError(
            "layer_types of config.json must be full_attention or sliding_attention for each of the "
            f"{num_layers} layers, got {shown(kinds)}"
        )
    windowed = ["::2"] if kinds == alternating else [str(at) for at, kind in enumerate(kinds) if "sliding" in kind]
    config["model"] |= {
        "layers": [{"at": at, "attention": {"window": window}} for at in windowed] if window else [],
        "logit_soft_cap": fields.optional("final_logit_softcapping", 30.0),
    }
    config["attention"] |= {
        "head_dim": fields.get("head_dim", 256),
        "soft_cap": fields.optional("attn_logit_softcapping", 50.0),
        "scale": fields.checked("query_pre_attn_scalar", float, default=256, above=0) ** -0.5,
    }
    config["feedforward"]["activation"] = fields.activation("hidden_activation", "gelu_pytorch_tanh")
    return config
