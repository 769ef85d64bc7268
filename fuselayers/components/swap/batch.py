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
    """Return a small batch for a model of transformers; None for another model, or an input of an unknown kind.

    Its tensors are on the device of the model's parameters. torch's random state does not change.
    """
    config = getattr(model, "config", None)
    main: Any = getattr(model, "main_input_name", None)
    make = _INPUTS.get(main) if isinstance(main, str) else None
    if config is None or make is None:
        return None
    parameter = next(model.parameters(), torch.empty(0))
    try:
        batch = {main: make(config)}
        if hasattr(model, "logit_scale") and main == "input_ids":  # the model compares texts with images
            batch["pixel_values"] = _pixels(config)
    except (AttributeError, TypeError, ValueError):  # Musicgen has two text configs
        return None
    takes = inspect.signature(type(model).forward).parameters
    if main == "input_ids" and "labels" in takes and _has_token_labels(model):
        batch["labels"] = batch[main]
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = _tokens(config)
    return {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }


def _has_token_labels(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"))


def _tokens(config: Any) -> Tensor:
    text = config.get_text_config()
    # Small numbers are often special tokens, such as padding, which would be masked.
    lowest = min(4, text.vocab_size - 1)
    tokens = torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS)
    return tokens % int(text.vocab_size - lowest) + int(lowest)


def _pixels(config: Any) -> Tensor:
    parts = (config, getattr(config, "vision_config", None), getattr(config, "encoder", None))
    images: Any = next((part for part in parts if getattr(part, "image_size", None) is not None), config)
    size = images.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return _noise(_ROWS, getattr(images, "num_channels", 3), height, width)


def _audio_features(config: Any) -> Tensor:
    return _noise(_ROWS, config.num_mel_bins, 2 * config.max_source_positions)  # Whisper halves the length


def _audio(config: Any) -> Tensor:
    if hasattr(config, "num_mel_bins"):  # a spectrogram, of AST
        return _noise(_ROWS, config.max_length, config.num_mel_bins)
    return _noise(_ROWS, 4000)  # a quarter of a second


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


_INPUTS: Final = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _audio_features,
    "input_values": _audio,
}
