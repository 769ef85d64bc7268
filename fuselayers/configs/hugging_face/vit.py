"""ViT with its classifier."""

from typing import Any, Final

from ...names import shown
from .family import Family, Key, both, qkv
from .fields import Fields

FAMILY: Final = Family(
    keys=(
        Key("vit.embeddings.cls_token", "class_token"),
        Key("vit.embeddings.position_embeddings", "position.table.weight"),
        *both("vit.embeddings.patch_embeddings.projection", "patch.projection"),
        *qkv("vit.layers.{}.attention.", "q_proj", "k_proj", "v_proj"),
        *both("vit.layers.{}.attention.o_proj", "blocks.{}.attention.out"),
        *both("vit.layers.{}.layernorm_before", "blocks.{}.residual.norms.0"),
        *both("vit.layers.{}.layernorm_after", "blocks.{}.residual.norms.1"),
        *both("vit.layers.{}.mlp.fc1", "blocks.{}.feedforward.up"),
        *both("vit.layers.{}.mlp.fc2", "blocks.{}.feedforward.down"),
        *both("vit.layernorm", "norm"),
        *both("classifier", "head"),
    ),
    # The head of another task.
    skipped=(r"vit\.pooler\..*",),
    older=(
        (r"^vit\.encoder\.layer\.", "vit.layers."),
        (r"\.attention\.attention\.query\.", ".attention.q_proj."),
        (r"\.attention\.attention\.key\.", ".attention.k_proj."),
        (r"\.attention\.attention\.value\.", ".attention.v_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    ),
)


def read(fields: Fields) -> dict[str, Any]:
    classes = fields.get("id2label", {"0": "", "1": ""})  # config.json leaves out the default of two classes
    if not isinstance(classes, dict):
        raise ValueError(f"id2label of config.json must name the classes, got {shown(classes)}")
    return {
        "model": {
            "image_size": _side(fields, "image_size", 224),
            "patch_size": _side(fields, "patch_size", 16),
            "channels": fields.get("num_channels", 3),
            "num_classes": len(classes),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.get("num_hidden_layers"),
            "dropout": fields.get("hidden_dropout_prob", 0.0),
        },
        "attention": {
            "num_heads": fields.get("num_attention_heads"),
            "dropout": fields.get("attention_probs_dropout_prob", 0.0),
            "bias": fields.get("qkv_bias", True),
            "out_bias": True,
        },
        "feedforward": {
            "width": fields.get("intermediate_size"),
            "activation": fields.activation("hidden_act", "gelu"),
        },
        "norm": {"eps": fields.get("layer_norm_eps", 1e-12)},
    }


def _side(fields: Fields, name: str, default: int) -> Any:
    side = fields.get(name, default)
    if not isinstance(side, list):
        return side
    if len(side) != 2 or side[0] != side[1]:
        raise ValueError(f"{name} of config.json must be square, got {shown(side)}")
    return side[0]
