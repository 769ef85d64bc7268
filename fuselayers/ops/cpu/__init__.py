"""The ops' kernels for a CPU, in C++: built when the package is installed, loaded at the first call."""

from .library import TYPES as TYPES
from .library import Heads as Heads
from .library import has_kernels as has_kernels
from .library import name_of as name_of
from .library import pointer as pointer
from .library import rows as rows
from .library import run as run
from .library import vector as vector
