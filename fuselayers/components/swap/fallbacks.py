"""A record of the swapped modules that ran their original forward, and why."""

import weakref

from torch import nn

from ..._torch.dispatch import is_compiling
from ...errors import warn_once
from .report import Skipped

# Kept outside the modules: Dynamo would guard an attribute of a module, and copies and pickles would include it.
_reasons: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def fallbacks(model: nn.Module) -> tuple[Skipped, ...]:
    """Return the swapped modules of a model that have run their original forward, each with its first reason.

    In each call a swapped layer checks the modules that it bypasses. If one of them has become an adapter or a
    quantised layer, or has a hook or a sharded parameter, the call is correct but not fused. The first such call for
    each class and reason warns, with a `FallbackWarning`. Calls of compiled code are not recorded: the compiler traces
    one of the two forwards.

    >>> import torch, warnings
    >>> from fuselayers.components.swap import swap
    >>> layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    >>> report = swap(layer, level="layers", verify=False)
    >>> handle = layer[0].register_forward_hook(lambda *_: None)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     y = layer(torch.randn(3, 8))
    >>> [skipped.reason for skipped in fallbacks(layer)]
    ['0 has a hook']
    """
    return tuple(
        Skipped(name, type(module).__name__, reason)
        for name, module in model.named_modules()
        if (reason := _reasons.get(module)) is not None
    )


def note(module: nn.Module, reason: str) -> None:
    """Record that a call of the module runs the original forward, and warn."""
    if is_compiling():
        return
    _reasons.setdefault(module, reason)
    warn_once(f"{type(module).__name__} runs its original forward, not the fused one: {reason}; see swap.fallbacks")


def forget(module: nn.Module) -> None:
    """Drop the recorded reason of a module."""
    _reasons.pop(module, None)
