"""Phi-1, Phi-1.5 and Phi-2: attention and feedforward side by side behind one norm, and a bias of the logits."""

from typing import Any, Final

from .family import Family, Key, both, qkv
from .fields import Fields
from .rotary import rotary

FAMILY: Final = Family(
    keys=(
        Key("model.embed_tokens.weight", "token.weight"),
        *both("model.layers.{}.input_layernorm", "blocks.{}.residual.norms.0"),
        *qkv("model.layers.{}.self_attn.", "q_proj", "k_proj", "v_proj"),
        # Where the config has qk_layernorm.
        *both("model.layers.{}.self_attn.q_layernorm", "blocks.{}.attention.q_norm"),
        *both("model.layers.{}.self_attn.k_layernorm", "blocks.{}.attention.k_norm"),
        *both("model.layers.{}.self_attn.dense", "blocks.{}.attention.out"),
        *both("model.layers.{}.mlp.fc1", "blocks.{}.feedforward.up"),
        *both("model.layers.{}.mlp.fc2", "blocks.{}.feedforward.down"),
        *both("model.final_layernorm", "norm"),
        Key("lm_head.weight", "head.weight"),
        Key("lm_head.bias", "bias"),
    ),
    repeated={"lm_head.weight": "model.embed_tokens.weight"},
    # The speeds of rotary positions, which older versions stored.
    skipped=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)


def read(fields: Fields) -> dict[str, Any]:
    num_heads, eps = fields.get("num_attention_heads"), fields.get("layer_norm_eps", 1e-5)
    context_length = fields.get("max_position_embeddings", 2048)
    normed = fields.flag("qk_layernorm", default=False)
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.get("num_hidden_layers"),
            "context_length": context_length,
            "dropout": fields.get("resid_pdrop", 0.0),
            "embedding_dropout": fields.get("embd_pdrop", 0.0),
            "tie_embeddings": fields.get("tie_word_embeddings", False),
        },
        "attention": {
            "num_heads": num_heads,
            "num_kv_heads": fields.get("num_key_value_heads", num_heads),
            "head_dim": fields.optional("head_dim"),
            "dropout": fields.get("attention_dropout", 0.0),
            **({"qk_norm": "layer_norm", "qk_norm_eps": eps} if normed else {}),
        },
        "feedforward": {
            "width": fields.get("intermediate_size"),
            "activation": fields.activation("hidden_act", "gelu_new"),
        },
        "norm": {"eps": eps},
        "position": rotary(
            fields,
            base=fields.get("rope_theta", 10000.0),
            context_length=context_length,
            fraction=fields.get("partial_rotary_factor", 0.5),
        ),
    }
