"""Positions: they give a model the order of its tokens."""

from .position import ALiBiPosition as ALiBiPosition
from .position import LearnedPosition as LearnedPosition
from .position import NoPosition as NoPosition
from .position import Position as Position
from .position import RelativePosition as RelativePosition
from .position import SinusoidalPosition as SinusoidalPosition
from .rotary import RotaryPosition as RotaryPosition
