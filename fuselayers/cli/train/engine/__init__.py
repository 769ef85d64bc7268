"""The engine of a training: one process, or PyTorch's own pieces over several."""

from .engine import Engine as Engine
from .engine import device_of as device_of
from .engine import start_engine as start_engine
from .layout import Layout as Layout
from .layout import layout_of as layout_of
from .processes import Processes as Processes
from .processes import joined_processes as joined_processes
from .sharding import fusion_for as fusion_for
