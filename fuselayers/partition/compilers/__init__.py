"""Compilers: each cuts a Dynamo graph into forward and backward, and makes it callable."""

from .eager import compile_eager as compile_eager
from .inductor import compile_inductor as compile_inductor
from .inductor import compile_triton as compile_triton
from .inductor import why_inductor_is_unavailable as why_inductor_is_unavailable
from .nvfuser import compile_nvfuser as compile_nvfuser
from .nvfuser import nvfuser_hint as nvfuser_hint
from .nvfuser import why_nvfuser_is_unavailable as why_nvfuser_is_unavailable
