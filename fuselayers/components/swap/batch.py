"""A batch made from a model's config, for callers that pass none."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by position and by name."""

_ROWS: Final = 2
_TOKENS: Final = 16


def as_call(batch: Any) -> Call:
    """Return a batch as call arguments: a mapping by name, a tuple by position, or one tensor."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def made_batch(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a small batch of tokens or of images for a model of transformers; None for any other model.

    Its tensors are on the device of the model's parameters. torch's random state does not change.
    """
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    parameter = next(model.parameters(), torch.empty(0))
    try:
        if main == "input_ids":
            batch = {"input_ids": _tokens(config)}
        elif main == "pixel_values":
            batch = {"pixel_values": _pixels(config)}
        else:
            return None
    except (AttributeError, TypeError, ValueError):  # Musicgen has two text configs
        return None
    takes = inspect.signature(type(model).forward).parameters
    heads = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
    if "input_ids" in batch and "labels" in takes and type(model).__name__.endswith(heads):  # labels are tokens
        batch["labels"] = batch["input_ids"]
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = _tokens(config)
    return {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }


def _tokens(config: Any) -> Tensor:
    text = config.get_text_config()
    # Small numbers are often special tokens, such as padding, which would be masked.
    lowest = min(4, text.vocab_size - 1)
    tokens = torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS)
    return tokens % int(text.vocab_size - lowest) + int(lowest)


def _pixels(config: Any) -> Tensor:
    size = config.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    shape = (_ROWS, getattr(config, "num_channels", 3), height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
