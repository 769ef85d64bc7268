"""OPT: GPT-2 with relu. Its table of positions begins with two rows that no token uses."""

from typing import Any, Final

from .family import Family, Key, both, qkv
from .fields import Fields

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
    hidden_dim = fields.get("hidden_size")
    fields.require("word_embed_proj_dim", hidden_dim)  # of OPT-350m it is half of it
    fields.require("_remove_final_layer_norm", False)
    fields.require("layer_norm_elementwise_affine", True)
    fields.require("layerdrop", 0.0)
    biases = fields.get("enable_bias", True)
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": hidden_dim,
            "num_layers": fields.get("num_hidden_layers"),
            "context_length": fields.get("max_position_embeddings", 2048),
            "dropout": fields.get("dropout", 0.1),
            "tie_embeddings": fields.get("tie_word_embeddings", True),
        },
        "attention": {
            "num_heads": fields.get("num_attention_heads"),
            "dropout": fields.get("attention_dropout", 0.0),
            "bias": biases,
        },
        "feedforward": {
            "width": fields.get("ffn_dim"),
            "activation": fields.activation("activation_function", "relu"),
            "bias": biases,
        },
        "residual": {"name": "pre" if fields.flag("do_layer_norm_before", default=True) else "post"},
    }
