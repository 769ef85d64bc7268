"""modes -- what a graph of Dynamo's does besides computing: it switches modes, and holds checkpoints. Used by auto."""

from typing import Final

import torch
from torch import fx

from .._torch.tracing import SWITCHES_OF_MODES, all_nodes

_AUTOCAST: Final = ("cpu", "cuda")


class Modes:
    """The present gradient mode and autocast, to be restored.

    A graph of Dynamo's switches them by calls. An error between two of these calls leaves them switched.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]
        self._cache = torch.is_autocast_cache_enabled()
        self._depth = _autocast_depth()

    def restore(self) -> None:
        """Restore them. Autocast drops the weights that it cast where its outermost `with` ends."""
        torch.set_grad_enabled(self._grad)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        while _autocast_depth() > self._depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def switches_modes(graph_module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's switches what `Modes` restores."""
    return any(node.target in SWITCHES_OF_MODES for node in all_nodes(graph_module))


def holds_checkpoints(graph_module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's holds `torch.utils.checkpoint`, which running the graph ignores."""
    op = torch.ops.higher_order.tag_activation_checkpoint
    return any(node.target is op for node in all_nodes(graph_module))
