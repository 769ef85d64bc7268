"""Embeddings: how tokens or pieces of an image become vectors.

    tokens   [...]                          int64 or int32
    images   [B, channels, height, width]   B batch
    y        [..., D]                       D model; for images [B, N, D] with N patches: along each side
                                            (pixels + 2 padding - P) // stride + 1 with P the patch_size

token: y = weight[token], with the table weight [V, D], V vocabulary; scaled, as in the first transformer (Vaswani et
al. 2017, section 3.4) and Gemma: y = sqrt(D) * weight[token].

patch: y[b, n] = projection.weight . patch n of image b + projection.bias, the patches row by row. Dosovitskiy et al.,
"An image is worth 16x16 words", 2021, section 3.1. With a stride below P patches overlap: Wang et al., "PVT v2", 2022,
section 3.2.
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from .option import Count, Size, checked
from .registry import register


@register("embedding", "token")
class TokenEmbedding(nn.Embedding):
    """torch's embedding, optionally scaled. Its `weight`, which a tied head reads, is unscaled.

    Args:
        vocab_size: V, number of different tokens.
        hidden_dim: D, the width of the model.
        scale: whether the vectors are multiplied by sqrt(D).

    Raises:
        ValueError: a size is below one.

    >>> TokenEmbedding(10, 8, scale=True)
    TokenEmbedding(10, 8, scale=True)
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"vocab_size", "hidden_dim"})

    @checked
    def __init__(self, vocab_size: Size, hidden_dim: Size, *, scale: bool = False) -> None:
        super().__init__(vocab_size, hidden_dim)
        self.scale = scale

    @property
    def weights_mean(self) -> str | None:
        """The meaning of the weight if it is not the vectors themselves, for `carry_weights`."""
        return "vectors by sqrt(D)" if self.scale else None

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D] in the weight's dtype."""
        y = super().forward(tokens)
        return y * math.sqrt(self.embedding_dim) if self.scale else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"


@register("embedding", "patch")
class PatchEmbedding(nn.Module):
    """A convolution whose stride equals its kernel size, unless patches overlap.

    Args:
        hidden_dim: D, the width of the model.
        patch_size: P, the side of a patch in pixels.
        channels: number of channels of an image, 3 for RGB.
        stride: distance between neighbouring patches in pixels, at most P; None for P. Without overlap and padding the
            sides of an image must be multiples of P.
        padding: pixels of zeros on every side of the image, less than P.
        bias: whether the linear map has a bias.

    Raises:
        ValueError: a size out of its range; in forward, images of another shape.
        TypeError: in forward, images that are not a floating-point tensor.

    >>> import torch
    >>> PatchEmbedding(8, patch_size=4)(torch.zeros(1, 3, 8, 12)).shape
    torch.Size([1, 6, 8])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"hidden_dim", "patch_size", "channels"})

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        patch_size: Size,
        channels: Size = 3,
        stride: Size | None = None,
        padding: Count = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        stride = patch_size if stride is None else stride
        if stride > patch_size:
            raise ValueError(f"stride must be at most patch_size, {patch_size}, got {stride}: pixels would be left out")
        if padding >= patch_size:
            raise ValueError(f"padding must be below patch_size, {patch_size}, got {padding}: patches would be empty")
        self.patch_size = patch_size
        self.channels = channels
        self.stride = stride
        self.padding = padding
        self.projection = nn.Conv2d(channels, hidden_dim, patch_size, stride=stride, padding=padding, bias=bias)

    def patches_along(self, pixels: int) -> int:
        """Return the number of patches along a side of an image.

        Raises:
            ValueError: the side is too short for a patch, or is not a multiple of the size of patches without overlap.
        """
        if self.stride == self.patch_size and not self.padding:
            if pixels == 0 or pixels % self.patch_size:
                raise ValueError(
                    f"the sides of images must be multiples of patch_size, {self.patch_size}, got {pixels}; "
                    "resize or pad the images"
                )
        elif pixels + 2 * self.padding < self.patch_size:
            least = self.patch_size - 2 * self.padding
            raise ValueError(f"the sides of images must be at least {least} pixels, for one patch, got {pixels}")
        return (pixels + 2 * self.padding - self.patch_size) // self.stride + 1

    def forward(self, images: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, N, D]."""
        self.check_images(images)
        patches_BDHW: Tensor = self.projection(images)
        return patches_BDHW.flatten(2).transpose(1, 2)

    def check_images(self, images: Tensor) -> None:
        """Raise the errors of `forward`, which calls this."""
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a tensor [B, {self.channels}, height, width], got {type(images).__name__}")
        if not images.is_floating_point():
            raise TypeError(f"images must be floating, got {images.dtype}; convert with images.float() / 255")
        shape = list(images.shape)
        if len(shape) != 4 or shape[1] != self.channels:
            hint = "; add the batch dimension with images[None]" if len(shape) == 3 else ""
            raise ValueError(f"images must be [B, {self.channels}, height, width], got {shape}{hint}")
        for pixels in images.shape[2:]:
            self.patches_along(pixels)
