"""`fuselayers data prepare`: text as a file of tokens that training maps into memory."""

from .command import DESCRIPTION as DESCRIPTION
from .command import add_arguments as add_arguments
from .command import run as run
