"""The calls of swapped modules that took the original forward, and why."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..._torch.dispatch import is_compiling
from ..._torch.hooks import hooks_of_all_modules
from ...errors import say_once
from ..hooks import has_hooks
from .report import Skipped

__all__ = ["fallbacks", "forget", "note", "why_not"]

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
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> report = swap(layer, level="layers", verify=False)
    >>> handle = layer.linear1.register_forward_hook(lambda *_: None)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     y = layer(torch.randn(3, 1, 8))
    >>> [one.reason for one in fallbacks(layer)]
    ['linear1 has a hook']
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


def why_not(module: nn.Module, path: str, test: Callable[[Any], bool]) -> str:
    """Return why a call may not bypass the attribute at `path`, which fails a test."""
    if hasattr(test, "reason"):
        return str(test.reason)
    if not path:  # of a sequence
        return "its modules have changed"
    try:
        value: Any = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        return f"there is no {path}"
    if not isinstance(value, nn.Module):
        return f"{path} is a {_name(value)}"
    if "forward" in value.__dict__:
        return f"{path} has a forward of its own"
    if has_hooks(value):
        return f"{path} has a hook"
    if hooks_of_all_modules():
        return "there is a hook of all modules"
    parts = {f"{path}.{name}": part for name, part in value.named_parameters(recurse=False)}
    strange = next((name for name, part in parts.items() if type(part) is not nn.Parameter), None)
    return f"{path} is a {_name(value)}" if strange is None else f"{strange} is a {_name(parts[strange])}"


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
