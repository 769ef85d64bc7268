"""Small models, with weights so large that every part of them moves the logits."""

from typing import Any, Final

import torch
from torch import Tensor

from fuselayers.components import Choice, Decoder, Encoder, EncoderDecoder, HierarchicalVision, VisionTransformer

__all__ = ["HEADS", "SIZES", "made", "tokens"]

HEADS: Final = Choice("multi_head", {"num_heads": 2})
_WORDS: Final = {"vocab_size": 13, "hidden_dim": 8, "num_layers": 2, "context_length": 6, "attention": HEADS}
_IMAGES: Final = {"num_classes": 5, "init": "bert"}
SIZES: Final[dict[type, dict[str, Any]]] = {
    Decoder: _WORDS,
    Encoder: _WORDS,
    EncoderDecoder: {**_WORDS, "context_length": 7},
    VisionTransformer: {
        **_IMAGES,
        **{"image_size": 12, "patch_size": 4, "hidden_dim": 8, "num_layers": 2, "attention": HEADS},
    },
    HierarchicalVision: {
        **_IMAGES,
        **{"image_size": 10, "widths": (4, 8), "depths": (1, 2), "patch_sizes": (5, 2), "strides": (3, 2)},
        "attention": Choice("multi_head", {"num_heads": 1, "num_kv_heads": 1}),
    },
}


def made(model: type, **options: Any) -> Any:
    return model(**{**SIZES[model], "init_std": 0.5, **options})


def tokens(*shape: int) -> Tensor:
    return torch.randint(13, shape)
