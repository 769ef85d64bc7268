"""T5, versions 1.0 and 1.1."""

from typing import Any, Final

from .family import Family, Key
from .fields import Fields


def _stack(name: str, *, feedforward: int) -> tuple[Key, ...]:
    theirs, ours = f"{name}.block.{{}}.layer", f"{name}.blocks.{{}}"
    attentions = [("0.SelfAttention", "attention")] + [("1.EncDecAttention", "cross_attention")] * (feedforward == 2)
    return (
        *(Key(f"{theirs}.{a}.{part}.weight", f"{ours}.{b}.qkv.weight") for a, b in attentions for part in "qkv"),
        *(Key(f"{theirs}.{a}.o.weight", f"{ours}.{b}.out.weight") for a, b in attentions),
        *(Key(f"{theirs}.{n}.layer_norm.weight", f"{ours}.residual.norms.{n}.weight") for n in range(feedforward + 1)),
        Key(f"{theirs}.{feedforward}.DenseReluDense.wi.weight", f"{ours}.feedforward.up.weight"),
        # The gated form of version 1.1.
        Key(f"{theirs}.{feedforward}.DenseReluDense.wi_0.weight", f"{ours}.feedforward.gate.weight"),
        Key(f"{theirs}.{feedforward}.DenseReluDense.wi_1.weight", f"{ours}.feedforward.up.weight"),
        Key(f"{theirs}.{feedforward}.DenseReluDense.wo.weight", f"{ours}.feedforward.down.weight"),
        Key(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{name}.position.table.weight"),
        Key(f"{name}.final_layer_norm.weight", f"{name}.norm.weight"),
    )


FAMILY: Final = Family(
    keys=(
        Key("shared.weight", "token.weight"),
        *_stack("encoder", feedforward=1),
        *_stack("decoder", feedforward=2),
        Key("lm_head.weight", "head.weight"),
    ),
    repeated=dict.fromkeys(
        ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    ),
    # The first files hold it, but no model uses it.
    skipped=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)


def read(fields: Fields) -> dict[str, Any]:
    hidden_dim, tied = fields.checked("d_model", int, minimum=1), fields.get("tie_word_embeddings", True)
    gated, _, activation = str(fields.get("feed_forward_proj", "relu")).rpartition("-")
    if gated not in ("", "gated"):
        raise ValueError(f"feed_forward_proj of config.json must be relu or gated-gelu, got {gated}-{activation}")
    # `transformers` uses the tanh form in this combination.
    activation = "gelu_new" if (gated, activation) == ("gated", "gelu") else activation
    dropout = fields.get("dropout_rate", 0.1)
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": hidden_dim,
            "num_layers": fields.get("num_layers"),
            "num_decoder_layers": fields.get("num_decoder_layers", fields.get("num_layers")),
            "context_length": fields.get("n_positions", 512),
            "dropout": dropout,
            "tie_embeddings": tied,
            "logit_scale": hidden_dim**-0.5 if fields.get("scale_decoder_outputs", tied) else 1.0,
            "start_token": fields.get("decoder_start_token_id", fields.get("pad_token_id", 0)),
        },
        "attention": {"num_heads": fields.get("num_heads"), "head_dim": fields.get("d_kv"), "dropout": dropout},
        "feedforward": {
            "name": "gated_mlp" if gated else "fused_mlp",
            "width": fields.get("d_ff"),
            "activation": Fields({"feed_forward_proj": activation}).activation("feed_forward_proj", "relu"),
            "dropout": dropout,
        },
        "norm": {"eps": fields.get("layer_norm_epsilon", 1e-6)},
        "position": {
            "num_buckets": fields.get("relative_attention_num_buckets", 32),
            "max_distance": fields.get("relative_attention_max_distance", 128),
        },
    }
