"""A config of plain eager layers. Used by the comparison after training and by `bench model`."""

from dataclasses import replace
from typing import Final

from ..components.registry import Choice
from ..configs import Config

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
    options = dict(config.model.options)
    if "layers" in options:
        options["layers"] = tuple(
            replace(change, feedforward=_plain(change.feedforward))
            if isinstance(change.feedforward, Choice)
            else change
            for change in options["layers"]
        )
    return replace(
        config,
        model=Choice(config.model.name, options),
        feedforward=_plain(config.feedforward),
        fusion=replace(config.fusion, scope="none"),
    )


def _plain(feedforward: Choice) -> Choice:
    return Choice(same_layer(feedforward.name), feedforward.options)
