"""Checks that a config fits the text, and that it fits a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...components import Choice, LayerChange
from ...configs import COMPONENT_SECTIONS, Config
from ...configs.sections import with_layer_changes
from ..plain import same_layer
from .data import VOCAB_SIZE, Text

# Dropout may change between two sessions of one run.
_FREE_OPTIONS = frozenset({"dropout", "stochastic_depth"})


def sequence_length(config: Config, text: Text) -> int:
    """The number of tokens of a training sequence.

    Raises:
        ValueError: the model cannot predict the next token of the text, or its context is shorter than
            `data.sequence_length`.
    """
    model = config.model
    if model.name != "decoder":
        raise ValueError(
            f"train needs a model that predicts the next token, a decoder; model.name is {model.name!r}; "
            "take model=gpt_nano, gpt2_small or llama_tiny"
        )
    vocab_size, context_length = int(model.options["vocab_size"]), int(model.options["context_length"])
    if vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size must be at least {VOCAB_SIZE} to hold every byte of {text.source}, got {vocab_size}; "
            f"add model.vocab_size={VOCAB_SIZE}"
        )
    length = config.data.sequence_length or context_length
    if length > context_length:
        raise ValueError(
            f"data.sequence_length must be at most model.context_length, {context_length}, got {length}; "
            "make one smaller or the other larger"
        )
    return length


def check_same_architecture(saved: Config, config: Config, *, path: Path) -> None:
    """Refuse to continue a checkpoint as another model.

    The shapes of the weights are not enough: four heads have the weights of eight. `mlp` and `fused_mlp` are two
    implementations of one layer, so one may replace the other.

    Raises:
        ValueError: names the differences.
    """
    before, now = _architecture(saved), _architecture(config)
    differences = [
        f"{key} is {before.get(key, 'not set')} there and {now.get(key, 'not set')} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differences:
        raise ValueError(
            f"the checkpoint {path} is of another architecture: {'; '.join(differences)}; leave these overrides out, "
            "or train anew without train.resume="
        )


def _architecture(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section in COMPONENT_SECTIONS:
        choice = getattr(config, section)
        # Complete, so that two spellings of the same model are equal.
        found |= _flat(section, with_layer_changes(config) if section == "model" else choice)
    return found


def _flat(key: str, value: Any) -> dict[str, Any]:
    """Nested choices and differing layers as {"feedforward": "mlp", "feedforward.expansion": 4.0, ...}."""
    if isinstance(value, Choice):
        value = {"name": value.name, **value.options}
    if isinstance(value, LayerChange):
        value = {part: chosen for part, chosen in vars(value).items() if chosen is not None}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {key: same_layer(value) if isinstance(value, str) else value}
    found: dict[str, Any] = {}
    for option, inner in value.items():
        if option not in _FREE_OPTIONS:
            found |= _flat(key if option == "name" else f"{key}.{option}", inner)
    return found
