"""The implementations of an op: dispatch, and the launch of Triton kernels."""

from .dispatch import Op as Op
from .dispatch import autocast_dtype as autocast_dtype
from .dispatch import backward_takes_formula as backward_takes_formula
from .dispatch import define as define
from .dispatch import differentiable as differentiable
from .dispatch import gradients_by_formula as gradients_by_formula
from .dispatch import in_cpp as in_cpp
from .dispatch import needs_grad as needs_grad
from .dispatch import runs_cpp as runs_cpp
from .dispatch import uses_kernels as uses_kernels
from .dispatch import without_autocast as without_autocast
from .dispatch import without_repeats as without_repeats
