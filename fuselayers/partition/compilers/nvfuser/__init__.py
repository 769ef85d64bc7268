"""The nvFuser backend: regions of a graph run as `FusionDefinition`s, and torch runs the rest."""

from .availability import nvfuser_hint as nvfuser_hint
from .availability import why_nvfuser_is_unavailable as why_nvfuser_is_unavailable
from .compile import compile_nvfuser as compile_nvfuser
