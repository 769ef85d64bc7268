"""hierarchical_vision -- a classifier of images in stages: each has fewer and wider tokens than the one before it.

    images    [B, channels, S, S]   B batch, S the side of an image in pixels
    map       [B, D, P, P]          the tokens of a stage as an image of D channels; D its width, P patches along a side
    x         [B, T, D]             the same row by row, T = P^2
    logits    [B, num_classes]

    map = images
    for each stage:   x = patch embedding(map), + positions;   x = norm(blocks(x));   map = x
    logits = head(mean of x over the tokens)

Wang et al., "Pyramid vision transformer", 2021, section 3, and "PVT v2", 2022, section 3.2 (overlapping patches); with
attention=pooling Yu et al., "MetaFormer is actually what you need for vision", 2022.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...ops import dropout as dropout_op
from ..embedding import PatchEmbedding
from ..init import Scheme, check_scheme, initialise
from ..linear import Linear
from ..option import NotNegative, Probability, Size, checked, options
from ..registry import Choice, as_choice, register
from .layers import LayerChange, matching_layers
from .stack import Stack
from .vision_transformer import Classifier


@register("model", "hierarchical_vision")
class HierarchicalVision(Classifier):
    """Stages of an overlapping patch embedding and blocks, and a linear head on the mean of the last tokens.

    Heads have the same width in every stage: a stage that is twice as wide has twice as many.

    The arguments and errors of `Model`, and:

    Args:
        image_size: S, the side of the square images in pixels.
        num_classes: number of different classes.
        widths: D of each stage.
        depths: number of blocks of each stage.
        patch_sizes: side of the patches of each stage, in pixels for the first stage, then in tokens of the stage
            before.
        strides: distance between neighbouring patches of each stage.
        channels: number of channels of an image, 3 for RGB.
        attention: the attention of all stages and its options; `num_heads` is that of the first stage.
        position: the kind of position of each stage, and its options.
        layers: other components for some blocks, counted through all stages, see `LayerChange`.

    Raises:
        ValueError: as `Model`; or lists of different lengths, or a stage without patches.

    >>> import torch
    >>> heads = Choice("multi_head", {"num_heads": 1})
    >>> sizes = {"widths": (8, 16), "depths": (1, 1), "patch_sizes": (3, 3), "strides": (2, 2)}
    >>> model = HierarchicalVision(image_size=8, num_classes=5, **sizes, attention=heads)
    >>> [stage.context_length for stage in model.stages], model(torch.zeros(2, 3, 8, 8)).shape
    ([16, 4], torch.Size([2, 5]))
    """

    patch: nn.ModuleList

    @checked
    def __init__(
        self,
        *,
        image_size: Size,
        num_classes: Size,
        widths: tuple[Size, ...],
        depths: tuple[Size, ...],
        patch_sizes: tuple[Size, ...],
        strides: tuple[Size, ...],
        attention: Choice | str,
        channels: Size = 3,
        feedforward: Choice | str = "mlp",
        norm: Choice | str = "layer_norm",
        residual: Choice | str = "pre",
        position: Choice | str = "learned",
        block: Choice | str = "transformer",
        layers: Sequence[LayerChange] = (),
        dropout: Probability = 0.0,
        init: Scheme = "vit",
        init_std: NotNegative = 0.02,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        if init == "mup":
            raise ValueError("init 'mup' is for models of one width; use another scheme")
        check_scheme(init, base_width=None)
        _check_stages(widths=widths, depths=depths, patch_sizes=patch_sizes, strides=strides)
        super().__init__()
        self.image_size = image_size
        self.channels = channels
        self.dropout = dropout
        self.patch = nn.ModuleList()
        for width, patch_size, stride in zip(widths, patch_sizes, strides, strict=True):
            padding = (patch_size - 1) // 2
            self.patch.append(
                PatchEmbedding(width, patch_size=patch_size, channels=channels, stride=stride, padding=padding)
            )
            channels = width
        sides, changes = _sides(self.patch, image_size), _changes_of_stages(layers, widths, depths)
        self.stages = nn.ModuleList(
            Stack(
                width,
                causal=False,
                num_layers=depth,
                context_length=side**2,
                attention=_with_heads(attention, width, widths[0]),
                layers=of_stage,
                feedforward=feedforward,
                norm=norm,
                residual=residual,
                position=position,
                block=block,
                dropout=dropout,
                backend=backend,
                partition=partition,
            )
            for width, depth, side, of_stage in zip(widths, depths, sides, changes, strict=True)
        )
        # The first stage has the most tokens.
        self.context_length = self.stages[0].context_length
        self.head = Linear(widths[-1], num_classes)
        self.logit_scale = 1.0
        initialise(self, init, num_layers=sum(depths), std=init_std)

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the head: [B, channels, S, S] -> [B, D]."""
        self.check_images(images)
        x = images
        stages: Any = zip(self.patch, self.stages, strict=True)
        for patch, stage in stages:
            x_BTD = dropout_op(stage.position(patch(x)), self.dropout, training=self.training)
            x_BTD = stage.run_blocks(x_BTD)
            side = math.isqrt(stage.context_length)
            x = x_BTD.transpose(1, 2).unflatten(2, (side, side))
        return x.flatten(2).mean(2)

    def extra_repr(self) -> str:
        return f"image_size={self.image_size}, dropout={self.dropout}"


def _check_stages(**lists: tuple[int, ...]) -> None:
    stages = len(lists["widths"])
    for name, values in lists.items():
        if len(values) != stages or not values:
            raise ValueError(f"{name} must have one number for each stage, {stages or 'at least one'}, got {[*values]}")


def _with_heads(attention: Choice | str, hidden_dim: int, first_dim: int) -> Choice:
    """Return the choice with the heads of a stage of width `hidden_dim`; the first stage has `first_dim`."""
    chosen = as_choice(attention)
    heads = {
        name: chosen.options[name]
        for name in ("num_heads", "num_kv_heads")
        if any(option.name == name for option in options("attention", chosen.name)) and chosen.options.get(name)
    }
    for name, number in heads.items():
        if number * hidden_dim % first_dim:
            raise ValueError(
                f"heads must be as wide in every stage: the first has {name} {number} at hidden_dim {first_dim}, which "
                f"does not fit hidden_dim {hidden_dim}; make it a multiple of {first_dim // number or 1}"
            )
    return Choice(chosen.name, {**chosen.options, **{name: n * hidden_dim // first_dim for name, n in heads.items()}})


def _sides(patches: Iterable[Any], side: int) -> Iterator[int]:
    """Yield the number of patches along a side for each stage; `side` is that of an image."""
    for stage, patch in enumerate(patches):
        try:
            side = patch.patches_along(side)
        except ValueError as error:
            raise ValueError(f"stage {stage}: {error}") from None
        yield side


def _changes_of_stages(
    changes: Sequence[LayerChange], widths: Sequence[int], depths: Sequence[int]
) -> Iterator[list[LayerChange]]:
    """Yield the changes of each stage, with its layers counted from 0 and heads for its width."""
    layers = [(change, layer) for change in changes for layer in matching_layers(change.at, sum(depths))]
    first = 0
    for width, depth in zip(widths, depths, strict=True):
        own = [replace(change, at=str(layer - first)) for change, layer in layers if first <= layer < first + depth]
        yield [
            change
            if change.attention is None
            else replace(change, attention=_with_heads(change.attention, width, widths[0]))
            for change in own
        ]
        first += depth
