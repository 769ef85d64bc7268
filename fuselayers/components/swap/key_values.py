"""The cache of keys and values that a block of transformers fills in its forward, kept out of the block's graph."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["entry_to_fill", "find_cache", "is_cache", "with_states"]

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
    """Return whether a value is a cache of transformers, for a decoder or for an encoder and a decoder."""
    utils = sys.modules.get("transformers.cache_utils")
    return utils is not None and isinstance(value, (utils.Cache, utils.EncoderDecoderCache))


def entry_to_fill(block: nn.Module, cache: Any) -> int | None:
    """Return the number of the block's entry in a cache, or None where its keys and values are not all there is to it:
    the entry has some already, the cache is of fixed length, holds two caches, or moves entries to the CPU."""
    utils = sys.modules["transformers.cache_utils"]
    numbers = {part.__dict__["layer_idx"] for part in block.modules() if "layer_idx" in part.__dict__}
    if type(cache) is not utils.DynamicCache or cache.offloading or len(numbers) != 1:
        return None
    (number,) = numbers
    if number >= len(cache.layers):
        return number if cache.layer_class_to_replicate is utils.DynamicLayer else None
    entry = cache.layers[number]
    grows = type(entry) in (utils.DynamicLayer, utils.DynamicSlidingWindowLayer)
    return number if grows and not entry.is_initialized else None


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


@functools.cache
def _empty_cache() -> Any:
    class CacheWithoutNumbers(sys.modules["transformers.cache_utils"].DynamicCache):  # type: ignore[misc]
        states: _States | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> _States:
            self.states = (key_states, value_states)
            return self.states

    return CacheWithoutNumbers
