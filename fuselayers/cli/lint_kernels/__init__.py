"""`fuselayers lint-kernels`: compiles every kernel for several GPUs and checks the figures."""

from .command import DESCRIPTION as DESCRIPTION
from .command import add_arguments as add_arguments
from .command import run as run
