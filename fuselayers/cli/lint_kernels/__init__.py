"""`fuselayers lint-kernels`: what the compilers make of each kernel, for GPUs that need not be here."""

from .command import DESCRIPTION as DESCRIPTION
from .command import SUMMARY as SUMMARY
from .command import add_arguments as add_arguments
from .command import run as run
