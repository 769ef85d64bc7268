"""BLOOM: ALiBi instead of position embeddings, and a norm after the token embeddings."""

from typing import Any, Final

from .family import Family, Key, both
from .fields import Fields

FAMILY: Final = Family(
    keys=(
        Key("transformer.word_embeddings.weight", "token.weight"),
        *both("transformer.word_embeddings_layernorm", "embedding_norm"),
        *both("transformer.h.{}.input_layernorm", "blocks.{}.residual.norms.0"),
        *both("transformer.h.{}.self_attention.query_key_value", "blocks.{}.attention.qkv", by_head=True),
        *both("transformer.h.{}.self_attention.dense", "blocks.{}.attention.out"),
        *both("transformer.h.{}.post_attention_layernorm", "blocks.{}.residual.norms.1"),
        *both("transformer.h.{}.mlp.dense_h_to_4h", "blocks.{}.feedforward.up"),
        *both("transformer.h.{}.mlp.dense_4h_to_h", "blocks.{}.feedforward.down"),
        *both("transformer.ln_f", "norm"),
        Key("lm_head.weight", "head.weight"),
    ),
    repeated={"lm_head.weight": "transformer.word_embeddings.weight"},
    older=((r"^(?=(word_embeddings|word_embeddings_layernorm|h|ln_f)\.)", "transformer."),),
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("apply_residual_connection_post_layernorm", False)
    fields.require("slow_but_exact", False)
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.checked(fields.name_of("n_embed", "hidden_size"), int, minimum=1),
            "num_layers": fields.get(fields.name_of("num_hidden_layers", "n_layer")),
            "context_length": fields.get("seq_length", 2048),
            "dropout": fields.get("hidden_dropout", 0.0),
            "tie_embeddings": fields.get("tie_word_embeddings", True),
        },
        "attention": {
            "num_heads": fields.get(fields.name_of("num_attention_heads", "n_head")),
            "dropout": fields.get("attention_dropout", 0.0),
        },
        "norm": {"eps": fields.get("layer_norm_epsilon", 1e-5)},
    }
