"""A config as YAML text."""

from .schemas import Config
from .source import plain_sections
from .yaml_text import dump

__all__ = ["to_yaml"]


def to_yaml(config: Config) -> str:
    """Return a config as YAML, every option of it; `compose` of a file with this text gives an equal config.

    >>> from fuselayers.configs import compose
    >>> print(to_yaml(compose("gpt_nano")).partition("residual:")[0], end="")
    model:
    ...
    norm:
      name: layer_norm
      eps: 1.0e-05
      bias: true
    """
    return dump(plain_sections(config))
