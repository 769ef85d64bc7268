"""The implementations of an op: dispatch, the launch of Triton kernels, and formulas compiled for a CPU."""

from .dispatch import COMPILED_FROM as COMPILED_FROM
from .dispatch import Op as Op
from .dispatch import autocast_dtype as autocast_dtype
from .dispatch import define as define
from .dispatch import differentiable_gradients as differentiable_gradients
from .dispatch import needs_grad as needs_grad
from .dispatch import uses_kernels as uses_kernels
from .dispatch import without_repeats as without_repeats
