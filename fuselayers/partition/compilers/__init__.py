"""Compilers: each file turns a traced graph into something to call, its forward and backward cut apart."""

from .eager import compile_eager as compile_eager
from .inductor import compile_inductor as compile_inductor
from .inductor import why_inductor_is_unavailable as why_inductor_is_unavailable
