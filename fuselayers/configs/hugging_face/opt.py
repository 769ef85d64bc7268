"""OPT: GPT-2 with relu. The first two rows of its position table are not used by any token."""

from typing import Any, Final

from .family import Family, Key, both, qkv
from .fields import Fields, shared

FAMILY: Final = Family(
    keys=(
        Key("model.decoder.embed_tokens.weight", "token.weight"),
        Key("model.decoder.embed_positions.weight", "position.table.weight", first_row=2),
        *both("model.decoder.layers.{}.self_attn_layer_norm", "blocks.{}.residual.norms.0"),
        *qkv("model.decoder.layers.{}.self_attn.", "q_proj", "k_proj", "v_proj"),
        *both("model.decoder.layers.{}.self_attn.out_proj", "blocks.{}.attention.out"),
        *both("model.decoder.layers.{}.final_layer_norm", "blocks.{}.residual.norms.1"),
        *both("model.decoder.layers.{}.fc1", "blocks.{}.feedforward.up"),
        *both("model.decoder.layers.{}.fc2", "blocks.{}.feedforward.down"),
        *both("model.decoder.final_layer_norm", "norm"),
        Key("lm_head.weight", "head.weight"),
    ),
    repeated={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    older=((r"^(?=decoder\.)", "model."),),
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("word_embed_proj_dim", fields.get("hidden_size"))  # OPT-350m has half of it
    fields.require("_remove_final_layer_norm", False)
    fields.require("layer_norm_elementwise_affine", True)
    fields.require("layerdrop", 0.0)
    config = shared(fields, tied=True, context_length=2048, width="ffn_dim", activation=("activation_function", "relu"))
    config["model"]["dropout"] = fields.get("dropout", 0.1)
    config["attention"]["dropout"] = fields.get("attention_dropout", 0.0)
    config["attention"]["bias"] = config["feedforward"]["bias"] = fields.get("enable_bias", True)
    before = fields.checked("do_layer_norm_before", bool, default=True)
    return {**config, "residual": {"name": "pre" if before else "post"}}
