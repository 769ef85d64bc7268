"""A config as YAML text."""

from .schemas import Config
from .source import plain_sections
from .yaml_text import dump

__all__ = ["to_yaml"]


def to_yaml(config: Config) -> str:
    """Return a config as YAML, every option of it; `compose` of a file with this text gives an equal config.

    >>> from fuselayers.configs import compose
    >>> print(to_yaml(compose("llama_tiny")).partition("residual:")[0], end="")
    model:
    ...
    norm:
      name: rms_norm
      eps: 1.0e-06
    """
    return dump(plain_sections(config))
