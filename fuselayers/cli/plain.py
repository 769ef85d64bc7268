"""A config of plain eager layers. Used by the comparison after training and by `bench model`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ..components import Choice, LayerChange
from ..configs import COMPONENT_SECTIONS, Config

# Fused layers, and the plain ones with the same parameters and numbers.
_PLAIN: Final = {"fused_mlp": "mlp"}


def same_layer(name: str) -> str:
    """The name of the plain layer that computes what this one does; its own when it is plain.

    >>> same_layer("fused_mlp"), same_layer("gated_mlp")
    ('mlp', 'gated_mlp')
    """
    return _PLAIN.get(name, name)


def plain_config(config: Config) -> Config:
    """The same model without fusion, and with plain layers in place of fused ones, wherever they are chosen.

    >>> from fuselayers.configs import compose
    >>> plain_config(compose("gpt_nano", ["feedforward=fused_mlp"])).feedforward.name
    'mlp'
    """
    sections = {section: _plain(getattr(config, section)) for section in COMPONENT_SECTIONS}
    return replace(config, **sections, fusion=replace(config.fusion, scope="none"))


def _plain(value: Any) -> Any:
    """Replace layers inside too: differing layers, experts; a layer may be a bare name."""
    if isinstance(value, str):
        return same_layer(value)
    if isinstance(value, Choice):
        return Choice(same_layer(value.name), _plain(value.options))
    if isinstance(value, LayerChange):
        return LayerChange(**_plain(vars(value)))
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(entry) for entry in value)
    return value
