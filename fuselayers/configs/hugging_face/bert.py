"""BERT."""

from typing import Any, Final

from .family import Family, Key, both, qkv
from .fields import Fields, shared

FAMILY: Final = Family(
    keys=(
        Key("bert.embeddings.word_embeddings.weight", "token.weight"),
        Key("bert.embeddings.position_embeddings.weight", "position.table.weight"),
        Key("bert.embeddings.token_type_embeddings.weight", "segment.weight"),
        *both("bert.embeddings.LayerNorm", "embedding_norm"),
        *qkv("bert.encoder.layer.{}.attention.self.", "query", "key", "value"),
        *both("bert.encoder.layer.{}.attention.output.dense", "blocks.{}.attention.out"),
        *both("bert.encoder.layer.{}.attention.output.LayerNorm", "blocks.{}.residual.norms.0"),
        *both("bert.encoder.layer.{}.intermediate.dense", "blocks.{}.feedforward.up"),
        *both("bert.encoder.layer.{}.output.dense", "blocks.{}.feedforward.down"),
        *both("bert.encoder.layer.{}.output.LayerNorm", "blocks.{}.residual.norms.1"),
        *both("cls.predictions.transform.dense", "head_dense"),
        *both("cls.predictions.transform.LayerNorm", "head_norm"),
        Key("cls.predictions.bias", "bias"),
        Key("cls.predictions.decoder.weight", "head.weight"),
    ),
    repeated={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    # The heads of other tasks, and the position indices 0, 1, 2, ...
    skipped=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"bert\.embeddings\.position_ids"),
    older=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("position_embedding_type", "absolute")
    fields.require("is_decoder", False)
    fields.require("add_cross_attention", False)
    fields.require("hidden_act", "gelu")  # also for the head, which has no option for it
    config = shared(fields, tied=True, context_length=512)
    config["model"] |= {
        "num_segments": fields.get("type_vocab_size", 2),
        "dropout": fields.get("hidden_dropout_prob", 0.1),
    }
    config["attention"]["dropout"] = fields.get("attention_probs_dropout_prob", 0.1)
    return {**config, "norm": {"eps": fields.get("layer_norm_eps", 1e-12)}}
