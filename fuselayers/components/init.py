"""Weight initialisation, as GPT-2 and BERT do it.

Each function may be called again, for example after `model.to_empty(device=...)` of a model that was built on the meta
device.
"""

import math

import torch
from torch import nn

from .norm import Norm
from .ranges import Range

__all__ = ["initialise_bert", "initialise_gpt2"]

_RESIDUAL_PROJECTIONS = ("attention.out", "feedforward.down")


def initialise_gpt2(model: nn.Module, *, num_layers: int, std: float = 0.02) -> None:
    """Initialise as GPT-2: small normal weights, smaller ones where a sublayer joins the residual stream.

    Weights of linear layers, convolutions and embeddings are normal with deviation `std`, those of the projections into
    the residual stream (`attention.out`, `feedforward.down`) with std / sqrt(2 * num_layers), so that the stream does
    not grow with depth. Biases are zero, norms are as they start. Radford et al. 2019, section 2.3.

    Args:
        model: any module; it is changed in place.
        num_layers: number of blocks, each of which joins the stream twice.
        std: the deviation.

    Raises:
        ValueError: num_layers is below one, or std is negative.

    >>> layer = nn.Linear(4, 4)
    >>> initialise_gpt2(layer, num_layers=2)
    >>> layer.bias.tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    Range(minimum=1).check("num_layers", num_layers)
    _initialise(model, std=std, residual_std=std / math.sqrt(2 * num_layers))


def initialise_bert(model: nn.Module, *, std: float = 0.02) -> None:
    """Initialise as BERT: as GPT-2, but without smaller weights for the projections into the residual stream.

    Normal rather than truncated normal, as the common PyTorch port does. Devlin et al. 2018.

    Args:
        model: any module; it is changed in place.
        std: the deviation.

    Raises:
        ValueError: std is negative.

    >>> norm = nn.Embedding(2, 2)
    >>> initialise_bert(norm, std=0.0)
    >>> norm.weight.tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    _initialise(model, std=std, residual_std=std)


@torch.no_grad()
def _initialise(model: nn.Module, *, std: float, residual_std: float) -> None:
    Range(minimum=0).check("std", std)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=residual_std if name.endswith(_RESIDUAL_PROJECTIONS) else std)
        elif isinstance(module, Norm):
            module.reset_parameters()
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter):
                nn.init.ones_(weight)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()  # what a module of another kind holds itself: scales of branches, sinks of heads
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)
