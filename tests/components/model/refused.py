"""Refused arguments: the same error from a model, from the fused model, and from `explain`."""

import functools
import re
from typing import Any

import pytest
from torch import nn

from fuselayers.partition import explain, fuse

__all__ = ["assert_refused"]


def assert_refused(model: nn.Module, error: type[Exception], text: str, /, *args: Any, **kwargs: Any) -> None:
    """Fail unless each call raises an error that begins with `text`, before anything is traced."""
    fused = fuse(model, backend="eager")
    calls: list[Any] = [model, fused]
    if "must be in" not in text:  # `explain` reads no values
        calls += [functools.partial(explain, call) for call in calls]
    for call in calls:
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            call(*args, **kwargs)
    assert not fused.report().graphs
