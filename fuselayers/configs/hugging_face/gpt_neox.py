"""GPT-NeoX and Pythia: attention and feedforward in parallel, each after its own norm; part of each head rotates."""

from typing import Any, Final

from .family import Family, Key, both
from .fields import Fields, shared
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
    # Causal masks and the frequencies of rotary positions, which older versions stored.
    skipped=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    older=((r"^embed_out\.", "lm_head."),),
)


def read(fields: Fields) -> dict[str, Any]:
    config = shared(fields, tied=False, context_length=2048)
    config["model"]["dropout"] = fields.get("hidden_dropout", 0.0)
    config["attention"]["dropout"] = fields.get("attention_dropout", 0.0)
    config["attention"]["bias"] = fields.get("attention_bias", True)
    parallel = {"name": "parallel", "separate_norms": True}
    return {
        **config,
        "norm": {"eps": fields.get("layer_norm_eps", 1e-5)},
        "residual": parallel if fields.checked("use_parallel_residual", bool, default=True) else {"name": "pre"},
        "position": rotary(
            fields,
            base=fields.get("rotary_emb_base", 10000.0),
            context_length=config["model"]["context_length"],
            fraction=fields.get("rotary_pct", 0.25),
        ),
    }
