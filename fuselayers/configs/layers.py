"""`model.layers`, a list of {at: which layers, part: its name or options}, for layers that differ from the rest.

`model.decoder_layers` of an encoder-decoder is another such list.
"""

from typing import Any, Final

from ..components import LayerChange
from ..components.model.layers import PARTS
from ..names import no_such
from .sections import as_section, changed, checked_choice, completed

__all__ = ["LAYER_OPTIONS", "checked_layers", "completed_layers"]

# The options of models that hold `LayerChange`s.
LAYER_OPTIONS: Final = ("layers", "decoder_layers")

# A saved config must stay within what `yaml_text.read` and `plain_copy` take.
_MOST: Final = 200


def completed_layers(entries: Any, sections: dict[str, Any], *, option: str = "layers") -> list[dict[str, Any]]:
    """Return the entries with every option of every part that they change.

    A part is changed as an override of its group would change it: what was set for the other layers stays, as far as
    it is not said anew.

    Args:
        entries: as they stand in the config.
        sections: the completed sections of the other layers.
        option: of the model, where they stand.

    Raises:
        ValueError: an entry of another form, no such part, name or option.
    """
    if not isinstance(entries, list):
        raise ValueError(f"model.{option} must be a list of mappings {{at: ..., part: ...}}, got {entries!r}")
    if len(entries) > _MOST:
        raise ValueError(
            f"model.{option} may have {_MOST} entries, got {len(entries):,}; "
            f"one entry may change many layers: {{at: 1::2, ...}}"
        )
    return [_completed(entry, f"model.{option}[{place}]", sections) for place, entry in enumerate(entries)]


def checked_layers(entries: Any, *, option: str = "layers") -> tuple[LayerChange, ...]:
    """Return completed entries as `LayerChange`s, each option checked by its annotation.

    Raises:
        ValueError: an option has another type or is out of its range.
    """
    return tuple(
        LayerChange(
            entry["at"],
            **{
                part: checked_choice(part, section, where=f"model.{option}[{place}].{part}")
                for part, section in entry.items()
                if part != "at"
            },
        )
        for place, entry in enumerate(entries)
    )


def _completed(entry: Any, where: str, sections: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(entry, dict) or "at" not in entry or len(entry) < 2:
        raise ValueError(
            f"{where} must say at which layers and what changes: {{at: 1::2, feedforward: ...}}, got {entry!r}"
        )
    at = entry["at"]
    if isinstance(at, bool) or not isinstance(at, (int, str)):
        raise ValueError(f"{where}.at must be an index or a slice such as 0 or 1::2, got {at!r}")
    result: dict[str, Any] = {"at": str(at)}
    for part, change in entry.items():
        if part == "at":
            continue
        if part not in PARTS:
            raise ValueError(no_such(f"part in {where}", part, PARTS))
        base = sections["model"]["block"] if part == "block" else sections[part]
        path = f"{where}.{part}"
        result[part] = completed(part, changed(part, base, as_section(change, path), where=path), where=path)
    return result
