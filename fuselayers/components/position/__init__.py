"""Positions: how a model knows the order of its tokens."""

from .learned import LearnedPosition as LearnedPosition
from .none import NoPosition as NoPosition
from .position import Position as Position
from .rotary import RotaryPosition as RotaryPosition
