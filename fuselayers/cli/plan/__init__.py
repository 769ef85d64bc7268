"""`fuselayers plan`: what a training step costs, on paper."""

from .command import DESCRIPTION as DESCRIPTION
from .command import add_arguments as add_arguments
from .command import run as run
