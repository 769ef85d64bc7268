"""Errors of every model: refused arguments of a call and of a constructor."""

import functools
import re
from typing import Any

import pytest
import torch

from fuselayers.components import (
    Choice,
    Decoder,
    Encoder,
    EncoderDecoder,
    HierarchicalVision,
    LayerChange,
    VisionTransformer,
)
from fuselayers.partition import explain, fuse
from tests.components.model.small import made

ZEROS = torch.zeros(2, 8, dtype=torch.int64)
TOKENS = ZEROS[:, :3]
IMAGES = torch.zeros(2, 3, 12, 12)
TOO_LONG = "; shorten it, or build the model with a longer context"


def refusals() -> list[Any]:
    """Return the model, the arguments of a call, and the error. Every model checks its arguments by itself."""
    of_tokens = [
        ([[1, 2]], TypeError, "tokens must be a tensor [B, T], got list; use torch.tensor(tokens)"),
        (ZEROS.float(), TypeError, "tokens must be int64 or int32, got torch.float32; convert with tokens.long()"),
        (ZEROS[0, :2], ValueError, "tokens must be [B, T], got [2]; add the batch dimension with tokens[None]"),
        (ZEROS[:, :0], ValueError, "tokens must hold at least one token per row, got [2, 0]"),
        (torch.tensor([[5, 13]]), ValueError, "tokens must be in 0..12, got 5..13"),
        (ZEROS[:, :7], ValueError, f"a sequence of 7 tokens does not fit the context_length 6{TOO_LONG}"),
    ]
    of_decoder = [
        ({"targets_BT": ZEROS[:, :4]}, "targets must be torch.int64 [2, 3] like tokens, got torch.int64 [2, 4]"),
        ({"targets_BT": TOKENS.int()}, "targets must be torch.int64 [2, 3] like tokens, got torch.int32 [2, 3]"),
        (
            {"targets_BT": torch.tensor([[-100, 0, 1], [2, 3, 13]])},
            "targets must be in 0..12 or -100, got -100..13",
        ),
    ]
    of_encoder = [
        ({"targets_BT": ZEROS[:, :2]}, "targets must be torch.int64 [2, 3] like tokens, got torch.int64 [2, 2]"),
        ({"segments_BT": TOKENS[:1]}, "segments must be torch.int64 [2, 3] like tokens, got torch.int64 [1, 3]"),
        ({"segments_BT": TOKENS + 2}, "segments must be in 0..1, got 2..2"),
        (
            {"key_padding_mask": torch.ones(2, 3)},
            "key_padding_mask must be torch.bool [2, 3] like tokens, got torch.float32 [2, 3]",
        ),
    ]
    without_segments = "this model has no segment embeddings; build it with num_segments, or leave segments out"
    of_pair = [
        ({}, "there is nothing to predict; pass targets_BT for a loss, or inputs_BT for logits"),
        ({"inputs_BT": torch.cat((TOKENS, TOKENS))}, "source and target must have as many rows, got 2 and 4"),
        (
            {"targets_BT": TOKENS, "inputs_BT": ZEROS[:, :4]},
            "targets must be torch.int64 [2, 4] like inputs, got torch.int64 [2, 3]",
        ),
        ({"inputs_BT": ZEROS[:, 0]}, "inputs must be [B, T], got [2]; add the batch dimension with inputs[None]"),
        ({"inputs_BT": TOKENS + 13}, "inputs must be in 0..12, got 13..13"),
        (
            {"inputs_BT": TOKENS, "key_padding_mask": torch.ones(2, 4).bool()},
            "key_padding_mask must be torch.bool [2, 5] like source, got torch.bool [2, 4]",
        ),
        ({"inputs_BT": ZEROS}, f"a sequence of 8 tokens does not fit the context_length 7{TOO_LONG}"),
    ]
    of_images = [
        (
            (IMAGES[:, :, :8], None),
            ValueError,
            "images must be 12 x 12 pixels, got [2, 3, 8, 12]; resize them, or build the model with another image_size",
        ),
        (([[1.0]], torch.tensor([1])), TypeError, "images must be a tensor [B, 3, height, width], got list"),
        ((IMAGES, [1, 2]), TypeError, "targets must be a tensor like images, one class each, got list"),
        (
            (IMAGES, torch.tensor([1])),
            ValueError,
            "targets must be torch.int64 [2] like images, one class each, got torch.int64 [1]",
        ),
        (
            (IMAGES, torch.tensor([1.0, 2.0])),
            ValueError,
            "targets must be torch.int64 [2] like images, one class each, got torch.float32 [2]",
        ),
        ((IMAGES, torch.tensor([1, 5])), ValueError, "targets must be in 0..4 or -100, got 1..5"),
    ]
    return [
        *((Decoder, {}, (wrong,), {}, error, text) for wrong, error, text in of_tokens),
        *((Decoder, {}, (TOKENS,), named, ValueError, text) for named, text in of_decoder),
        *((Encoder, {}, (TOKENS,), named, ValueError, text) for named, text in of_encoder),
        (Encoder, {"num_segments": 0}, (TOKENS,), {"segments_BT": TOKENS}, ValueError, without_segments),
        *((EncoderDecoder, {}, (ZEROS[:, :5],), named, ValueError, text) for named, text in of_pair),
        (
            *(EncoderDecoder, {}, (ZEROS[:, :5],), {"targets_BT": TOKENS.float()}, TypeError),
            "targets must be int64 or int32, got torch.float32; convert with targets.long()",
        ),
        *((VisionTransformer, {}, inputs, {}, error, text) for inputs, error, text in of_images),
    ]


@pytest.mark.parametrize(("model", "options", "inputs", "named", "error", "text"), refusals())
def test_a_call_is_refused_before_anything_is_traced(
    model: type, options: Any, inputs: Any, named: Any, error: type[Exception], text: str
) -> None:
    plain = made(model, **options)
    fused = fuse(plain, backend="eager")
    calls: list[Any] = [plain, fused]
    if "must be in" not in text:  # `explain` reads no values
        calls += [functools.partial(explain, call) for call in calls]
    for call in calls:
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            call(*inputs, **named)
    assert not fused.report().graphs


WINDOW = Choice("multi_head", {"num_heads": 2, "window": 3})


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (
            *(Decoder, {"position": Choice("rotary", {"fraction": 0.75})}),
            "position 'rotary' needs an even number of channels per head, at least two, got 3 (0.75 of 4)",
        ),
        (EncoderDecoder, {"start_token": 13}, "start_token must be in 0..12, got 13"),
        (
            *(EncoderDecoder, {"attention": WINDOW}),
            "cross_attention 'multi_head' (by default the choice of attention): attention with a window takes no "
            "memory; build it without window=",
        ),
        (VisionTransformer, {"image_size": 13}, "image_size must be a multiple of patch_size, got 13 and 4"),
        (VisionTransformer, {"pooling": "max"}, "no pooling 'max'; there are: class_token, mean"),
        (
            *(VisionTransformer, {"embedding": "token"}),
            "embedding 'token' (fuselayers.components.embedding.TokenEmbedding) does not take the argument "
            "'patch_size'",
        ),
        (HierarchicalVision, {"depths": (1,)}, "depths must have one number for each stage, 2, got [1]"),
        (HierarchicalVision, {"widths": ()}, "widths must have one number for each stage, at least one, got []"),
        (HierarchicalVision, {"depths": (1, 0)}, "depths[1] must be at least 1, got 0"),
        (
            *(HierarchicalVision, {"image_size": 2, "strides": (3, 1)}),
            "stage 1: the sides of images must be at least 2 pixels, for one patch, got 1",
        ),
        (
            *(HierarchicalVision, {"widths": (4, 6)}),
            "heads must be as wide in every stage: the first has num_heads 1 at hidden_dim 4, which does not fit "
            "hidden_dim 6; make it a multiple of 4",
        ),
        (HierarchicalVision, {"init": "mup"}, "init 'mup' is for models of one width; use another scheme"),
        (
            *(HierarchicalVision, {"layers": (LayerChange("3", attention="pooling"),)}),
            "layers.at '3' names none of the 3 layers, 0 to 2",
        ),
    ],
)
def test_a_constructor_refuses(model: type, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        made(model, **options)
