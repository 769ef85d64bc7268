"""Embeddings: how tokens or pieces of an image become vectors.

    tokens   [...]                          int64 or int32
    images   [B, channels, height, width]   B batch; height and width are multiples of P, patch_size
    y        [..., D]                       D model; of images [B, N, D], N = (height / P) * (width / P) patches

token: y = weight[token], with the table weight [V, D], V vocabulary; scaled, as in the first transformer (Vaswani et
al. 2017, section 3.4) and Gemma: y = sqrt(D) * weight[token].

patch: y[b, n] = projection.weight . patch n of image b + projection.bias, the patches row by row. Dosovitskiy et al.,
"An image is worth 16x16 words", 2021, section 3.1.
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from .ranges import Size, in_range
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

    @in_range
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
    """A convolution whose stride is as large as its kernel, so that patches do not overlap.

    Args:
        hidden_dim: D, the width of the model.
        patch_size: P, the side of a patch in pixels.
        channels: of the image, 3 for colours.
        bias: whether the linear map has a bias.

    Raises:
        ValueError: a size is below one; in forward, images of another shape.
        TypeError: in forward, images that are no floating tensor.

    >>> import torch
    >>> PatchEmbedding(8, patch_size=4)(torch.zeros(1, 3, 8, 12)).shape
    torch.Size([1, 6, 8])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"hidden_dim", "patch_size", "channels"})

    @in_range
    def __init__(self, hidden_dim: Size, *, patch_size: Size, channels: Size = 3, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.channels = channels
        self.projection = nn.Conv2d(channels, hidden_dim, kernel_size=patch_size, stride=patch_size, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, N, D]."""
        self._check(images)
        patches_BDHW: Tensor = self.projection(images)
        return patches_BDHW.flatten(2).transpose(1, 2)

    def _check(self, images: Tensor) -> None:
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a tensor [B, {self.channels}, height, width], got {type(images).__name__}")
        if not images.is_floating_point():
            raise TypeError(f"images must be floating, got {images.dtype}; convert with images.float() / 255")
        shape, side = list(images.shape), self.patch_size
        if len(shape) != 4 or shape[1] != self.channels:
            hint = "; add the batch dimension with images[None]" if len(shape) == 3 else ""
            raise ValueError(f"images must be [B, {self.channels}, height, width], got {shape}{hint}")
        if any(pixels == 0 or pixels % side for pixels in shape[2:]):
            raise ValueError(
                f"the height and width of images must be multiples of patch_size, {side} pixels, got {shape}; resize "
                "or pad the images"
            )
