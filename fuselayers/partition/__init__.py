"""The fusion core: trace forward and backward together, choose what to save, compile both."""

from .backends import BackendStatus as BackendStatus
from .backends import BackendUnavailableError as BackendUnavailableError
from .backends import FallbackWarning as FallbackWarning
from .backends import backends as backends
from .cost import CostModel as CostModel
from .fuse import FusedFunction as FusedFunction
from .fuse import fuse as fuse
from .fuse import memory_efficient_fusion as memory_efficient_fusion
from .fused_module import FusedModule as FusedModule
from .partitioners import PARTITIONERS as PARTITIONERS
from .partitioners import Partitioner as Partitioner
from .partitioners import default as default
from .partitioners import min_cut as min_cut
from .saved_bytes import saved_bytes as saved_bytes
