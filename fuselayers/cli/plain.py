"""A config of plain eager layers. Used by the comparison after training and by `bench model`."""

from dataclasses import replace
from typing import Final

from ..components import Choice, LayerChange, as_choice
from ..configs import Config
from ..configs.layers import LAYER_OPTIONS

__all__ = ["plain_config", "same_layer"]

# Fused layers, and the plain ones with the same parameters and numbers.
_PLAIN: Final = {"fused_mlp": "mlp"}


def same_layer(name: str) -> str:
    """The name of the plain layer that computes what this one does; its own when it is plain.

    >>> same_layer("fused_mlp"), same_layer("gated_mlp")
    ('mlp', 'gated_mlp')
    """
    return _PLAIN.get(name, name)


def plain_config(config: Config) -> Config:
    """The same model without fusion, and with plain layers in place of fused ones.

    >>> from fuselayers.configs import compose
    >>> plain_config(compose("gpt_nano", ["feedforward=fused_mlp"])).feedforward.name
    'mlp'
    """
    layers = {
        option: tuple(_plain_change(change) for change in config.model.options[option])
        for option in LAYER_OPTIONS
        if option in config.model.options
    }
    return replace(
        config,
        model=Choice(config.model.name, {**config.model.options, **layers}),
        feedforward=_plain_layer(config.feedforward),
        fusion=replace(config.fusion, scope="none"),
    )


def _plain_layer(choice: Choice) -> Choice:
    """The same of the layers within it, such as experts."""
    options = {
        name: _plain_layer(value) if isinstance(value, Choice) else value for name, value in choice.options.items()
    }
    return Choice(same_layer(choice.name), options)


def _plain_change(change: LayerChange) -> LayerChange:
    if change.feedforward is None:
        return change
    return replace(change, feedforward=_plain_layer(as_choice(change.feedforward)))
