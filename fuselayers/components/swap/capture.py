"""The hooks by which transformers returns hidden states and attentions: `output_hidden_states=True`.

The first such call gives them to the model for good. In other calls they do nothing, but they ask a `ContextVar`, at
which Dynamo breaks the graph: what lies on both sides of a break is saved. In code that is compiled transformers asks a
plain variable instead. Checked with transformers 5.24.
"""

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..._torch.dispatch import is_compiling, is_in_backward

# Blocks whose last call captured. A checkpoint calls them again in backward, when nothing is asked for any more, and
# must save the same values.
_captured: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def captures(block: nn.Module) -> bool:
    """Return whether hooks in a block return values in this call, or did in the call that this one repeats."""
    if not is_in_backward():
        collector = _collector()
        asked = collector is not None and bool(collector.get())
        (_captured.add if asked else _captured.discard)(block)
    return block in _captured


@contextlib.contextmanager
def nothing_captured() -> Iterator[None]:
    """While Dynamo traces, the hooks find in the plain variable that they have nothing to return."""
    collector = _collector()
    if collector is None or not is_compiling():
        yield
        return
    before = collector.compiling, collector.global_var
    collector.compiling, collector.global_var = True, None
    try:
        yield
    finally:
        collector.compiling, collector.global_var = before


def _collector() -> Any:
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return collector if hasattr(collector, "compiling") else None
