"""Positions: how a model knows the order of its tokens."""

from .alibi import ALiBiPosition as ALiBiPosition
from .learned import LearnedPosition as LearnedPosition
from .position import NoPosition as NoPosition
from .position import Position as Position
from .relative import RelativePosition as RelativePosition
from .rotary import RotaryPosition as RotaryPosition
from .sinusoidal import SinusoidalPosition as SinusoidalPosition
