import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import PatchEmbedding
from tests.components.compare import assert_same_step, randomise


def written_out(layer: PatchEmbedding, images: Tensor) -> Tensor:
    """Patch by patch, row by row, with a matmul."""
    side, projection = layer.patch_size, layer.projection
    patches = nn.functional.unfold(images, side, padding=layer.padding, stride=layer.stride)
    return nn.functional.linear(patches.mT, projection.weight.flatten(1), projection.bias)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"patch_size": 1, "channels": 1}, (1, 1)),
        ({"patch_size": 4}, (8, 12)),
        ({"patch_size": 3, "channels": 2, "bias": False}, (3, 9)),
        ({"patch_size": 7}, (7, 7)),
        ({"patch_size": 3, "stride": 2, "padding": 1}, (5, 8)),
        ({"patch_size": 7, "stride": 4, "padding": 3}, (9, 4)),
        ({"patch_size": 4, "stride": 3}, (9, 5)),
        ({"patch_size": 2, "stride": 2, "padding": 1}, (3, 1)),
        ({"patch_size": 3, "stride": 1, "padding": 2}, (1, 1)),
    ],
    ids=str,
)
def test_patch_values_and_gradients(options: dict[str, Any], shape: tuple[int, int]) -> None:
    layer: Any = randomise(PatchEmbedding(5, **options)).double()
    images = torch.randn(2, options.get("channels", 3), *shape).double()
    assert_same_step(functools.partial(written_out, layer), layer, images, rtol=1e-9, atol=1e-9)
    assert layer(images).shape[1] == layer.patches_along(shape[0]) * layer.patches_along(shape[1])


def test_errors_of_overlapping_patches() -> None:
    with pytest.raises(ValueError, match=r"^stride must be at most patch_size, 4, got 5: pixels would be left out$"):
        PatchEmbedding(5, patch_size=4, stride=5)
    with pytest.raises(ValueError, match=r"^padding must be below patch_size, 4, got 4: patches would be empty$"):
        PatchEmbedding(5, patch_size=4, padding=4)
    with pytest.raises(ValueError, match=r"^the sides of images must be at least 5 pixels, for one patch, got 4$"):
        PatchEmbedding(5, patch_size=7, stride=4, padding=1)(torch.zeros(1, 3, 9, 4))


@pytest.mark.parametrize(
    ("images", "error", "text"),
    [
        ([1], TypeError, "images must be a tensor [B, 3, height, width], got list"),
        (
            torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
            TypeError,
            "images must be floating, got torch.uint8; convert with images.float() / 255",
        ),
        (
            torch.zeros(3, 8, 8),
            ValueError,
            "images must be [B, 3, height, width], got [3, 8, 8]; add the batch dimension with images[None]",
        ),
        (
            torch.zeros(1, 3, 8, 10),
            ValueError,
            "the sides of images must be multiples of patch_size, 4, got 10; resize or pad the images",
        ),
    ],
)
def test_patch_errors_of_a_call(images: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        PatchEmbedding(5, patch_size=4)(images)
