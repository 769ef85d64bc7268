"""check_arguments -- a module's own check of its arguments, before its forward is traced."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def check_arguments(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, cls: type | None = None) -> None:
    """Call the `check_arguments` of a module whose class defines it beside its `forward`, for the same arguments.

    Used by `fuse` and `capture`. An error within a trace loses its text, or Dynamo splits the function there for good,
    and compiled code on a CPU ends the process where an index is out of range. A subclass with a forward of its own
    may take other arguments, so its parent's check is not called. `cls` is the class whose forward is called, if it is
    not the module's.
    """
    if isinstance(fn, nn.Module) and "forward" not in vars(fn):
        owner = next(base for base in (cls or type(fn)).__mro__ if "forward" in vars(base))
        if "check_arguments" in vars(owner):
            check: Any = fn.check_arguments
            check(*args, **kwargs)
