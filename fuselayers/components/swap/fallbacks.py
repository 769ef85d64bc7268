"""The calls of swapped modules that took the original forward, and why."""

import weakref

from torch import nn

from ..._torch.dispatch import is_compiling
from ...errors import say_once
from .report import Skipped

# Beside the modules and not in them: what a module holds is copied, pickled and guarded by Dynamo.
_reasons: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def fallbacks(model: nn.Module) -> tuple[Skipped, ...]:
    """Return the swapped modules of a model that have run their original forward, and why they did so first.

    A swapped layer looks at the modules that it bypasses in each call. Where one of them has become an adapter, a
    quantised layer, has got a hook or holds a shard, that call is right and not fused. The first such call of a
    class also warns, with a `FallbackWarning`. Calls of compiled code are not seen: the compiler traces one of the two
    forwards.

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
    """Keep that a call of the module takes the original forward, and warn."""
    if is_compiling():
        return
    _reasons.setdefault(module, reason)
    say_once(f"{type(module).__name__} runs its original forward, not the fused one: {reason}; see swap.fallbacks")


def forget(module: nn.Module) -> None:
    """Drop what was noted of a module."""
    _reasons.pop(module, None)
