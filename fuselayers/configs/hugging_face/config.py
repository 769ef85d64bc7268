"""config_of -- translates the config.json of a Hugging Face checkpoint into a config of this library.

Each reader starts from a shipped model of its family, and sets every size and option that config.json decides. The
readers were compared with `transformers` 5.20 to 5.24. A test covers every field that its configs hold.
"""

from collections.abc import Mapping
from typing import Any

from .families import FAMILIES
from .fields import Fields, translated


def config_of(content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the family of the weights and the config for `compose`, for the content of a config.json.

    Raises:
        ValueError: the model_type is unknown; a field is missing; or a field has a value that is not supported.
    """
    family: Any = content.get("model_type")
    architecture = translated(FAMILIES, family, called="model_type (of config.json)")
    if content.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a quantization_config; quantized weights are not supported, use the original weights"
        )
    return family, {"defaults": [{"model": architecture.model}], **architecture.read(Fields(content))}
