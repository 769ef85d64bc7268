import copy
import pickle
import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import PatchEmbedding
from tests.components.compare import assert_same_step, randomise


class WrittenOut(nn.Module):
    """Patch by patch, row by row, with a matmul."""

    def __init__(self, layer: PatchEmbedding) -> None:
        super().__init__()
        self.patch_size, self.projection = layer.patch_size, layer.projection

    def forward(self, images: Tensor) -> Tensor:
        side, projection = self.patch_size, self.projection
        height, width = images.shape[2:]
        patches = [
            images[:, :, top : top + side, left : left + side].flatten(1)
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        y = torch.stack(patches, dim=1) @ projection.weight.flatten(1).T
        return y if projection.bias is None else y + projection.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("patch_size", "channels", "shape"), [(1, 1, (1, 1)), (4, 3, (8, 12)), (3, 2, (3, 9)), (7, 3, (7, 7))]
)
def test_values_and_gradients(patch_size: int, channels: int, shape: tuple[int, int], bias: bool) -> None:
    layer = randomise(PatchEmbedding(5, patch_size=patch_size, channels=channels, bias=bias)).double()
    images = torch.randn(2, channels, *shape).double()
    assert_same_step(WrittenOut(layer), layer, images, rtol=1e-9, atol=1e-9)  # type: ignore[arg-type]


def test_compile_and_copies_and_autocast() -> None:
    layer, images = PatchEmbedding(5, patch_size=4), torch.randn(2, 3, 8, 12)
    expected = layer(images)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(images), expected)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(images), expected, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(images)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.02)


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
        (torch.zeros(1, 8, 8, 3), ValueError, "images must be [B, 3, height, width], got [1, 8, 8, 3]"),
        (
            torch.zeros(1, 3, 8, 10),
            ValueError,
            "the height and width of images must be multiples of patch_size, 4 pixels, got [1, 3, 8, 10]; resize or "
            "pad the images",
        ),
        (
            torch.zeros(1, 3, 0, 8),
            ValueError,
            "the height and width of images must be multiples of patch_size, 4 pixels, got [1, 3, 0, 8]; resize or "
            "pad the images",
        ),
    ],
)
def test_errors_of_a_call(images: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        PatchEmbedding(5, patch_size=4)(images)


@pytest.mark.parametrize("name", ["hidden_dim", "patch_size", "channels"])
def test_errors_of_the_constructor(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
        PatchEmbedding(**{"hidden_dim": 5, "patch_size": 4, name: 0})
