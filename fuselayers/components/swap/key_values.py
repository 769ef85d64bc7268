"""The cache of keys and values that a block of transformers fills in its forward, kept out of the block's graph."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .slots import original_type

__all__ = ["entry_to_fill", "find_cache", "is_cache", "with_callers", "with_states"]

# Note: [A cache and a graph]
# A decoder of transformers fills a cache in each call, in training too, unless it is called with use_cache=False. Each
# block writes to the entry of its own number, so a compiler would make a graph for each block. Here the graph gets an
# empty cache without numbers, and returns the keys and values that went into it. The block's own entry is filled after
# the call.

_States = tuple[Tensor, Tensor]


def find_cache(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the argument that is a cache, or None."""
    return next((name for name, value in arguments.items() if is_cache(value)), None)


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers."""
    utils = sys.modules.get("transformers.cache_utils")
    return utils is not None and isinstance(value, utils.Cache)


def entry_to_fill(block: nn.Module, cache: Any) -> int | None:
    """Return the number of the block's entry in a cache, or None if the block must run its own forward.

    The graph serves an entry that is empty and grows with the tokens, and a block that writes to it once, under the
    number `layer_idx` of the module that writes.
    """
    utils = sys.modules["transformers.cache_utils"]
    writers = [part for part in block.modules() if "layer_idx" in part.__dict__ and _writes_once(original_type(part))]
    kinds = tuple(getattr(utils, name, None) for name in ("DynamicLayer", "DynamicSlidingWindowLayer"))
    if type(cache) is not utils.DynamicCache or getattr(cache, "offloading", True) or len(writers) != 1:
        return None
    number: int = writers[0].__dict__["layer_idx"]
    if number >= len(cache.layers):
        return number if cache.layer_class_to_replicate in kinds[:1] else None
    entry = cache.layers[number]
    return number if type(entry) in kinds and not entry.is_initialized else None


@functools.cache
def _writes_once(cls: Any) -> bool:
    """Whether the source of a forward has one call that writes to a cache, with the module's own number."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
    except (OSError, TypeError):
        return False
    calls = re.findall(r"\.update\(([^()]*)\)", source)
    return len(calls) == 1 and re.fullmatch(r".*,\s*self\.layer_idx,?\s*", calls[0], re.DOTALL) is not None


def with_states(forward: Callable[..., Any]) -> Callable[..., tuple[Any, _States | None]]:
    """Return a function of a block, the arguments of its forward, and which of them is a cache.

    It returns the forward's result, and the keys and values that went into the cache.
    """
    kind = _empty_cache()

    @functools.wraps(forward)
    def run(block: nn.Module, arguments: Mapping[str, Any], name: str) -> tuple[Any, _States | None]:
        cache = kind()
        result = forward(block, **{**arguments, name: cache})
        return result, cache.states

    return run


def with_callers(result: Any, cache: Any) -> Any:
    """The result of a block, with the caller's cache wherever it holds the graph's."""
    kind = _empty_cache()
    return tree_map(lambda one: cache if isinstance(one, kind) else one, result, is_leaf=is_cache)


@functools.cache
def _empty_cache() -> Any:
    class CacheWithoutNumbers(sys.modules["transformers.cache_utils"].DynamicCache):  # type: ignore[misc]
        states: _States | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> _States:
            self.states = (key_states, value_states)
            return self.states

    return CacheWithoutNumbers
