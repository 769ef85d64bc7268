"""check_arguments -- a module's own check of its arguments, before its forward is traced."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def check_arguments(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call the `check_arguments` of a module whose class defines it beside its `forward`, for the same arguments.

    Used by `fuse` and `capture`. An error within a trace loses its text, or Dynamo splits the function there for good,
    and compiled code on a CPU ends the process where an index is out of range. A subclass with a forward of its own
    may take other arguments, so its parent's check is not called.
    """
    if isinstance(fn, nn.Module) and "forward" not in vars(fn):
        # The class of a fused module has a forward that is no function.
        owner = next((cls for cls in type(fn).__mro__ if inspect.isfunction(vars(cls).get("forward"))), nn.Module)
        if "check_arguments" in vars(owner):
            check: Any = fn.check_arguments
            check(*args, **kwargs)
