"""`fuselayers bench`: one op or model, eager against each backend."""

from .command import DESCRIPTION as DESCRIPTION
from .command import add_arguments as add_arguments
from .command import run as run
