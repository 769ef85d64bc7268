"""The implementations of an op: which one serves a call, and how Triton kernels and compiled code are run."""

from .dispatch import COMPILED_FROM as COMPILED_FROM
from .dispatch import autocast_dtype as autocast_dtype
from .dispatch import define as define
from .dispatch import each_once as each_once
from .dispatch import needs_grad as needs_grad
from .dispatch import run as run
from .dispatch import second_order as second_order
from .dispatch import takes_kernels as takes_kernels
