"""vision_transformer -- a classifier of images: their patches are the tokens.

    images    [B, channels, S, S]   B batch, S the side of an image in pixels
    x         [B, T, D]             T tokens: the patches, row by row, after the class token; D model; without overlap
                                    (S / patch_size)^2 patches
    targets   [B]
    logits    [B, num_classes]

Dosovitskiy et al., "An image is worth 16x16 words", 2021, section 3.1.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ...ops import dropout as dropout_op
from ..embedding import PatchEmbedding
from ..init import Scheme, check_scheme, initialise, logit_factor
from ..linear import Linear
from ..option import NotNegative, Probability, Size, checked, create
from ..registry import Choice, register
from .layers import LayerChange
from .stack import Stack
from .tokens import Loss, ModelWithHead, check_like_tokens

Pooling = Literal["class_token", "mean"]


class Classifier(ModelWithHead):
    """The base of the models of images: a linear `head` reads `features`, one vector for each image.

    Subclasses set these attributes, and define `features`.

    Attributes:
        patch: the embedding of the patches, or a list of those of several stages.
    """

    image_size: int
    channels: int
    patch: nn.Module
    head: nn.Linear
    logit_scale: float
    logit_soft_cap = None
    loss: Loss = "plain"

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the head: [B, channels, S, S] -> [B, D]."""
        raise NotImplementedError

    def forward(self, images: Tensor, targets_B: Tensor | None = None) -> Tensor:
        """Return the logits, or the loss if there are targets.

        Args:
            images: floating [B, channels, S, S].
            targets_B: int64 [B], the class of each image, or -100 for images that do not count; None for logits.

        Returns:
            The logits [B, num_classes]; with targets the mean cross entropy in nats, in training plus the auxiliary
            losses of the blocks: a float32 scalar.

        Raises:
            TypeError: the images are not a floating-point tensor, or the targets not a tensor.
            ValueError: images or targets of another shape or dtype, or a target that is not a class.
        """
        x_BD = self.features(images)
        # For the loss an image is a sequence of one token.
        return self.to_logits(x_BD) if targets_B is None else self.to_loss(x_BD[:, None], targets_B[:, None])

    def check_arguments(self, images: Tensor, targets_B: Tensor | None = None) -> None:
        """Raise the errors of `forward`. A call of the model runs this first."""
        self.check_images(images)
        check_like_tokens(
            "targets", targets_B, images[:, 0, 0, 0], dtype=torch.int64, like="images, one class each", table=self.head
        )

    def check_images(self, images: Tensor) -> None:
        """Raise unless the images fit the embedding and the positions."""
        patch = self.patch[0] if isinstance(self.patch, nn.ModuleList) else self.patch
        if isinstance(patch, PatchEmbedding):
            patch.check_images(images)
        # The embedding takes any multiple of the patch size; the positions are for one size.
        if images.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"images must be {self.image_size} x {self.image_size} pixels, got {list(images.shape)}; resize them, "
                "or build the model with another image_size"
            )

    def example_inputs(self, batch_size: int = 1, device: torch.device | str | None = "meta") -> tuple[Tensor, Tensor]:
        """Return inputs of `forward` in training: images [B, channels, S, S] and targets [B], all 0."""
        images = torch.zeros(batch_size, self.channels, self.image_size, self.image_size, device=device)
        return images, torch.zeros(batch_size, dtype=torch.int64, device=device)


@register("model", "vision_transformer")
class VisionTransformer(Classifier, Stack):
    """An encoder of patches with a linear head.

    The arguments and errors of `Model`, and:

    Args:
        image_size: S, the side of the square images in pixels, a multiple of patch_size where patches do not overlap.
        patch_size: side of a patch in pixels.
        num_classes: number of different classes.
        channels: number of channels of an image, 3 for RGB.
        pooling: the input of the head: "class_token" is a learned token before the patches, "mean" the mean of the
            patches.
        position: the kind of position and its options; the class token has one too.
        embedding: the embedding of the patches and its options, such as a stride for patches that overlap.

    >>> heads = Choice("multi_head", {"num_heads": 2})
    >>> sizes = {"image_size": 8, "patch_size": 4, "num_classes": 5, "hidden_dim": 8, "num_layers": 1}
    >>> model = VisionTransformer(**sizes, attention=heads)
    >>> model(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """

    @checked
    def __init__(
        self,
        *,
        image_size: Size,
        patch_size: Size,
        num_classes: Size,
        hidden_dim: Size,
        num_layers: Size,
        attention: Choice | str,
        channels: Size = 3,
        pooling: Pooling = "class_token",
        feedforward: Choice | str = "mlp",
        norm: Choice | str = "layer_norm",
        residual: Choice | str = "pre",
        position: Choice | str = "learned",
        embedding: Choice | str = "patch",
        block: Choice | str = "transformer",
        layers: Sequence[LayerChange] = (),
        dropout: Probability = 0.0,
        init: Scheme = "vit",
        init_std: NotNegative = 0.02,
        base_width: Size | None = None,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        check_scheme(init, base_width=base_width)
        with_class_token = pooling == "class_token"
        patch: nn.Module = create(
            "embedding", embedding, hidden_dim=hidden_dim, patch_size=patch_size, channels=channels
        )
        overlap = isinstance(patch, PatchEmbedding) and (patch.stride != patch_size or patch.padding)
        if image_size % patch_size and not overlap:  # the patches of a user's embedding must not overlap
            raise ValueError(f"image_size must be a multiple of patch_size, got {image_size} and {patch_size}")
        side = patch.patches_along(image_size) if overlap else image_size // patch_size  # type: ignore[operator]
        super().__init__(
            hidden_dim,
            num_layers=num_layers,
            context_length=side**2 + with_class_token,
            attention=attention,
            feedforward=feedforward,
            norm=norm,
            residual=residual,
            position=position,
            block=block,
            layers=layers,
            dropout=dropout,
            causal=False,
            backend=backend,
            partition=partition,
        )
        self.image_size = image_size
        self.channels = channels
        self.patch = patch
        self.class_token = nn.Parameter(torch.empty(hidden_dim)) if with_class_token else None
        self.head = Linear(hidden_dim, num_classes)
        self.logit_scale = logit_factor(hidden_dim, base_width)
        initialise(self, init, num_layers=num_layers, std=init_std, base_width=base_width)

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the head: [B, channels, S, S] -> [B, D]."""
        self.check_images(images)
        x_BTD: Tensor = self.patch(images)
        if self.class_token is not None:
            x_BTD = torch.cat((self.class_token.expand(x_BTD.shape[0], 1, -1), x_BTD), dim=1)
        x_BTD = self.run_blocks(dropout_op(self.position(x_BTD), self.dropout, training=self.training))
        return x_BTD.mean(1) if self.class_token is None else x_BTD[:, 0]

    def extra_repr(self) -> str:
        pooling = "mean" if self.class_token is None else "class_token"
        return f"{super().extra_repr()}, image_size={self.image_size}, pooling={pooling!r}"
