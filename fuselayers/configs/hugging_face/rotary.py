"""The rotary positions in a config.json, with their scaling."""

from typing import Any, Final

from ...names import shown
from .fields import Fields, translated

_SCALINGS: Final = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_OPTIONS: Final = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}


def rotary(fields: Fields, *, base: Any, context_length: Any, fraction: Any = None) -> dict[str, Any]:
    """Return the options of rotary positions for rope_parameters, or for the older rope_scaling.

    Args:
        fields: the fields of the config.json.
        base: rope_theta if the parameters do not hold it, as in older files.
        context_length: the model's context length. yarn stretches it unless the parameters hold an original length.
        fraction: partial_rotary_factor if the parameters do not hold it; None for a family that rotates whole heads.
    """
    asked: dict[str, Any] = {"rope_theta": base}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.get(name, {})
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise ValueError(f"{name} of config.json must be one mapping for all layers, got {shown(part)}")
        asked |= {key: value for key, value in part.items() if value is not None}
    older_name = asked.pop("type", "default")
    kind = asked.pop("rope_type", older_name)
    scaling = translated(_SCALINGS, kind, called="kind of rotary positions (rope_type of config.json)")
    options: dict[str, Any] = {"base": asked.pop("rope_theta"), "scaling": scaling}
    if fraction is not None:
        options["fraction"] = asked.pop("partial_rotary_factor", fraction)
    if kind == "yarn":
        asked.setdefault("original_max_position_embeddings", context_length)
    for name, value in asked.items():
        # These options have no effect at these values.
        if (name, value) in (("partial_rotary_factor", 1.0), ("truncate", True)):
            continue
        if name not in _OPTIONS:
            raise ValueError(f"config.json has {name} = {shown(value)} for rotary positions, which is not supported")
        options[_OPTIONS[name]] = value
    return options
