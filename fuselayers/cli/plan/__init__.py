"""`fuselayers plan`: computes the cost of a training step without running it."""

from .command import DESCRIPTION as DESCRIPTION
from .command import add_arguments as add_arguments
from .command import run as run
