"""The engine of a training: one process, or several through PyTorch's distributed wrappers."""

from .engine import Engine as Engine
from .engine import device_of as device_of
from .engine import fusion_of as fusion_of
from .engine import start_engine as start_engine
from .engine import with_cuda_graphs as with_cuda_graphs
from .processes import ALONE as ALONE
from .processes import Processes as Processes
from .processes import grouped as grouped
from .processes import joined_processes as joined_processes
