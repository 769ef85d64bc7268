"""`fuselayers tune`: measures the machine, or which backend serves a model best."""

from .command import DESCRIPTION as DESCRIPTION
from .command import add_arguments as add_arguments
from .command import run as run
