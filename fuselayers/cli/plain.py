"""A config with other layers or values. Used by the comparison after training and by `bench model`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from ..components import Choice, LayerChange
from ..configs import COMPONENT_SECTIONS, Config

# Fused layers, and the plain ones with the same parameters and numbers.
_PLAIN: Final = {"fused_mlp": "mlp"}


def plain_config(config: Config) -> Config:
    """The same model without fusion, and with plain layers in place of fused ones, wherever they are chosen."""
    plain = with_values(config, lambda _, value: _PLAIN.get(value, value) if isinstance(value, str) else value)
    return replace(plain, fusion=replace(config.fusion, scope="none"))


def with_values(config: Config, change: Callable[[str, Any], Any]) -> Config:
    """Return a config with `change(option, value)` for every single value of its components.

    Nested components are included: layers that differ, experts. The name of a component is passed as the option "name".
    """

    def changed(option: str, value: Any) -> Any:
        if isinstance(value, Choice):
            return Choice(change("name", value.name), changed(option, value.options))
        if isinstance(value, LayerChange):
            return LayerChange(**changed(option, vars(value)))
        if isinstance(value, Mapping):
            return {name: changed(name, entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(changed(option, entry) for entry in value)
        return change(option, value)

    return replace(config, **{section: changed(section, getattr(config, section)) for section in COMPONENT_SECTIONS})
