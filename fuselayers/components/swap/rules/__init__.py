"""The rules that are shipped."""

from typing import Final

from ..rule import Rule
from .activations import RULES as _ACTIVATIONS
from .attention import RULES as _ATTENTION
from .dropout import RULES as _DROPOUT
from .feedforward import RULES as _FEEDFORWARD
from .linear import RULES as _LINEAR
from .loss import RULES as _LOSS
from .norms import RULES as _NORMS

RULES: Final[tuple[Rule, ...]] = (*_LOSS, *_FEEDFORWARD, *_NORMS, *_DROPOUT, *_ACTIVATIONS, *_LINEAR, *_ATTENTION)
"""The rules that are shipped. If two fit a module, the first one is used."""
