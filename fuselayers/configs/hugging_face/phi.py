"""Phi-1, Phi-1.5 and Phi-2: attention and feedforward in parallel after one norm, and a bias on the logits."""

from typing import Any, Final

from .family import Family, Key, both, qkv
from .fields import Fields, grouped_heads, shared
from .rotary import rotary

FAMILY: Final = Family(
    keys=(
        Key("model.embed_tokens.weight", "token.weight"),
        *both("model.layers.{}.input_layernorm", "blocks.{}.residual.norms.0"),
        *qkv("model.layers.{}.self_attn.", "q_proj", "k_proj", "v_proj"),
        # Only if the config sets qk_layernorm.
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
    # The frequencies of rotary positions, which older versions stored.
    skipped=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)


def read(fields: Fields) -> dict[str, Any]:
    config = shared(fields, tied=False, activation=("hidden_act", "gelu_new"), context_length=2048)
    config["attention"] |= grouped_heads(fields)
    eps = fields.get("layer_norm_eps", 1e-5)
    config["model"] |= {
        "dropout": fields.get("resid_pdrop", 0.0),
        "embedding_dropout": fields.get("embd_pdrop", 0.0),
    }
    if fields.checked("qk_layernorm", bool, default=False):
        config["attention"] |= {"qk_norm": "layer_norm", "qk_norm_eps": eps}
    position = rotary(
        fields,
        base=fields.get("rope_theta", 10000.0),
        context_length=config["model"]["context_length"],
        fraction=fields.get("partial_rotary_factor", 0.5),
    )
    return {**config, "norm": {"eps": eps}, "position": position}
