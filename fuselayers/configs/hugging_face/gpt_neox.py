"""GPT-NeoX and Pythia: attention and feedforward side by side, each behind its own norm; part of a head rotates."""

from typing import Any, Final

from .family import Family, Key, both
from .fields import Fields
from .rotary import rotary

FAMILY: Final = Family(
    keys=(
        Key("gpt_neox.embed_in.weight", "token.weight"),
        *both("gpt_neox.layers.{}.input_layernorm", "blocks.{}.residual.norms.0"),
        *both("gpt_neox.layers.{}.attention.query_key_value", "blocks.{}.attention.qkv", by_head=True),
        *both("gpt_neox.layers.{}.attention.dense", "blocks.{}.attention.out"),
        *both("gpt_neox.layers.{}.post_attention_layernorm", "blocks.{}.residual.norms.1"),
        *both("gpt_neox.layers.{}.mlp.dense_h_to_4h", "blocks.{}.feedforward.up"),
        *both("gpt_neox.layers.{}.mlp.dense_4h_to_h", "blocks.{}.feedforward.down"),
        *both("gpt_neox.final_layer_norm", "norm"),
        Key("lm_head.weight", "head.weight"),
    ),
    repeated={"lm_head.weight": "gpt_neox.embed_in.weight"},
    # Causal masks and the speeds of rotary positions, which older versions stored.
    skipped=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    older=((r"^embed_out\.", "lm_head."),),
)


def read(fields: Fields) -> dict[str, Any]:
    parallel = {"name": "parallel", "separate_norms": True}
    context_length = fields.get("max_position_embeddings", 2048)
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.get("num_hidden_layers"),
            "context_length": context_length,
            "dropout": fields.get("hidden_dropout", 0.0),
            "tie_embeddings": fields.get("tie_word_embeddings", False),
        },
        "attention": {
            "num_heads": fields.get("num_attention_heads"),
            "dropout": fields.get("attention_dropout", 0.0),
            "bias": fields.get("attention_bias", True),
        },
        "feedforward": {
            "width": fields.get("intermediate_size"),
            "activation": fields.activation("hidden_act", "gelu"),
        },
        "norm": {"eps": fields.get("layer_norm_eps", 1e-5)},
        "residual": parallel if fields.flag("use_parallel_residual", default=True) else {"name": "pre"},
        "position": rotary(
            fields,
            base=fields.get("rotary_emb_base", 10000.0),
            context_length=context_length,
            fraction=fields.get("rotary_pct", 0.25),
        ),
    }
