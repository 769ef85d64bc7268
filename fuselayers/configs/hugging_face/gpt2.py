"""GPT-2."""

from typing import Any, Final

from .family import Family, Key, both
from .fields import Fields

FAMILY: Final = Family(
    keys=(
        Key("transformer.wte.weight", "token.weight"),
        Key("transformer.wpe.weight", "position.table.weight"),
        *both("transformer.h.{}.ln_1", "blocks.{}.residual.norms.0"),
        *both("transformer.h.{}.attn.c_attn", "blocks.{}.attention.qkv", transposed=True),
        *both("transformer.h.{}.attn.c_proj", "blocks.{}.attention.out", transposed=True),
        *both("transformer.h.{}.ln_2", "blocks.{}.residual.norms.1"),
        *both("transformer.h.{}.mlp.c_fc", "blocks.{}.feedforward.up", transposed=True),
        *both("transformer.h.{}.mlp.c_proj", "blocks.{}.feedforward.down", transposed=True),
        *both("transformer.ln_f", "norm"),
        Key("lm_head.weight", "head.weight"),
    ),
    repeated={"lm_head.weight": "transformer.wte.weight"},
    # Causal masks, which older versions stored.
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    older=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.checked("n_embd", int, minimum=1),
            "num_layers": fields.get("n_layer"),
            "context_length": fields.get("n_positions", 1024),
            "dropout": fields.get("resid_pdrop", 0.1),
            "embedding_dropout": fields.get("embd_pdrop", 0.1),
            "tie_embeddings": fields.get("tie_word_embeddings", True),
        },
        "attention": {"num_heads": fields.get("n_head"), "dropout": fields.get("attn_pdrop", 0.1)},
        "feedforward": {
            "width": fields.optional("n_inner"),
            "activation": fields.activation("activation_function", "gelu_new"),
        },
        "norm": {"eps": fields.get("layer_norm_epsilon", 1e-5)},
    }
