"""`model.layers`, a list of {at: which layers, part: its name or options}, for layers that differ from the rest.

`model.decoder_layers` of an encoder-decoder is another such list.
"""

# Note: [layers as they were asked for]
# A config keeps the entries as they are written, and completes them when a model is built. If it kept them complete, an
# override of a saved config (feedforward=fused_mlp, attention.soft_cap=null) would pass by the layers that differ in
# some other option of that part, and nothing would say so.

from collections.abc import Mapping
from typing import Any, Final

from ..components import Choice, LayerChange
from ..components.model.layers import PARTS, matching_layers
from ..names import no_such
from .sections import as_section, changed, checked_choice, completed

__all__ = ["LAYER_OPTIONS", "checked_entries", "with_layer_changes"]

# The options of models that hold such lists.
LAYER_OPTIONS: Final = ("layers", "decoder_layers")

# A saved config must stay within what `yaml_text.read` and `plain_copy` take.
_MOST: Final = 200


def checked_entries(entries: Any, *, option: str = "layers") -> tuple[dict[str, Any], ...]:
    """Return the entries as they were asked for, each `at` as text.

    Args:
        entries: as they stand in the config, references resolved.
        option: of the model, where they stand.

    Raises:
        ValueError: they have another form.
    """
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"model.{option} must be a list of mappings {{at: ..., part: ...}}, got {entries!r}")
    if len(entries) > _MOST:
        raise ValueError(
            f"model.{option} may have {_MOST} entries, got {len(entries):,}; "
            f"one entry may change many layers: {{at: 1::2, ...}}"
        )
    return tuple(_checked_entry(entry, f"model.{option}[{place}]") for place, entry in enumerate(entries))


def with_layer_changes(model: Choice, sections: Mapping[str, dict[str, Any]]) -> Choice:
    """Return the choice of a model with its entries as `LayerChange`s, each part with every option, and checked.

    A part is changed as an override of its group would change it: what was set for the other layers stays, as far as
    it is not said anew.

    Args:
        model: the choice, with entries of `checked_entries`.
        sections: the completed sections of the other layers.

    Raises:
        ValueError: no such part, name or option; an option has another type or is out of its range; or an `at` names
            no layer.
    """
    changes: dict[str, tuple[LayerChange, ...]] = {}
    for option in LAYER_OPTIONS:
        if option not in model.options:
            continue
        changes[option] = tuple(
            _layer_change(entry, f"model.{option}[{place}]", sections)
            for place, entry in enumerate(model.options[option])
        )
        depths = [model.options.get(name) for name in ("num_decoder_layers", "num_layers")]
        depth = (depths[0] or depths[1]) if option == "decoder_layers" else depths[1]
        if depth is not None:
            for change in changes[option]:
                matching_layers(change.at, depth)
    return Choice(model.name, {**model.options, **changes})


def _checked_entry(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or "at" not in entry or len(entry) < 2:
        raise ValueError(
            f"{where} must say at which layers and what changes: {{at: 1::2, feedforward: ...}}, got {entry!r}"
        )
    at = entry["at"]
    if isinstance(at, bool) or not isinstance(at, (int, str)):
        raise ValueError(f"{where}.at must be an index or a slice such as 0 or 1::2, got {at!r}")
    for part in entry:
        if part != "at" and part not in PARTS:
            raise ValueError(no_such(f"part in {where}", part, PARTS))
    return {**entry, "at": str(at)}


def _layer_change(entry: dict[str, Any], where: str, sections: Mapping[str, dict[str, Any]]) -> LayerChange:
    parts: dict[str, Choice] = {}
    for part, change in entry.items():
        if part == "at":
            continue
        base = sections["model"].get("block", {}) if part == "block" else sections[part]
        path = f"{where}.{part}"
        try:
            section = completed(part, changed(part, base, as_section(change, path), where=path), where=path)
        except ValueError as error:
            # An option is refused by its name alone; here the part may be one that only the other layers chose.
            raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from error
        parts[part] = checked_choice(part, section, where=path)
    return LayerChange(entry["at"], **parts)
