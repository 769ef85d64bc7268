"""`fuselayers train`: data, loop, checkpoint, curve, picture, sample and comparison."""

from .command import DESCRIPTION as DESCRIPTION
from .command import add_arguments as add_arguments
from .command import run as run
from .command import train as train
