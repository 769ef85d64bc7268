"""The forms of an op: which one a call takes, how compiled code and kernels are run, and what watches them."""

from .dispatch import autocast_dtype as autocast_dtype
from .dispatch import define as define
from .dispatch import each_once as each_once
from .dispatch import needs_grad as needs_grad
from .dispatch import run as run
from .dispatch import second_order as second_order
from .dispatch import takes_kernels as takes_kernels
from .replay import Replayed as Replayed
from .replay import Replays as Replays
from .replay import replayed as replayed
from .writer import apply as apply
