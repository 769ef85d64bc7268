"""The cache of one attention during generation: the keys and values of all earlier tokens.

    k, v   [B, G, T, C]   B batch, G key-value heads, T new tokens, C channels of a head

Memory, in elements: 2 x B x G x C for each token of its capacity.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..option import Size, checked


class KeyValueCache:
    """The keys and values of one attention, in memory that is allocated once.

    The cache stores all tokens even if the attention has a window, so that masks and biases can index every key.

    Args:
        capacity: the maximum number of tokens; None takes the number in the first `append`, as for a memory.

    Attributes:
        length: the number of stored tokens.

    Raises:
        ValueError: capacity is below one; in `append`, the cache is full, or keys and values do not fit it.
        RuntimeError: in `append`, a gradient would be lost.

    >>> cache = KeyValueCache(4)
    >>> k, v = cache.append(torch.ones(1, 2, 3, 5), torch.ones(1, 2, 3, 5))
    >>> k, v = cache.append(torch.zeros(1, 2, 1, 5), torch.zeros(1, 2, 1, 5))
    >>> cache.length, k[0, 0, :, 0]
    (4, tensor([1., 1., 1., 0.]))
    """

    @checked
    def __init__(self, capacity: Size | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys_and_values: list[Tensor] = []  # [B, G, capacity, C] each
        self._memory: KeyValueCache | None = None

    @property
    def of_memory(self) -> "KeyValueCache":
        """The cache of the cross-attention in the same block; it is filled once, with the whole memory."""
        if self._memory is None:
            self._memory = KeyValueCache()
        return self._memory

    def append(self, k_BGTC: Tensor, v_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; return those of all tokens so far, [B, G, length, C] each.

        The results are views. The next `append` does not change them.
        """
        if torch.is_grad_enabled() and (k_BGTC.requires_grad or v_BGTC.requires_grad):
            raise RuntimeError("a KeyValueCache keeps no gradients; generate under torch.no_grad()")
        end = self.length + k_BGTC.shape[2]
        if self.capacity is None:
            self.capacity = end
        if end > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens and holds {self.length}, got {k_BGTC.shape[2]} more; "
                "build it with a larger capacity"
            )
        new = (k_BGTC, v_BGTC)
        if not self._keys_and_values:
            self._keys_and_values = [part.new_empty(*part.shape[:2], self.capacity, part.shape[3]) for part in new]
        for stored_BGSC, part in zip(self._keys_and_values, new, strict=True):
            _check_fits(stored_BGSC, part.shape, part.dtype)
            stored_BGSC[:, :, self.length : end] = part
        self.length = end
        return self.stored()

    def check_keys(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise ValueError unless the stored keys have this shape, [B, G, length, C], and dtype.

        Used by cross-attention, which reads the keys of an earlier call.
        """
        if shape[2] != self.length:
            raise ValueError(
                f"the cache holds a memory of {self.length} tokens, got a memory of {shape[2]}; use a new cache"
            )
        _check_fits(self.stored()[0], shape, dtype)

    def stored(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values so far, [B, G, length, C] each.

        Raises:
            ValueError: the cache is empty.
        """
        if not self._keys_and_values:
            raise ValueError("the cache is empty; append to it first")
        k_BGSC, v_BGSC = (stored[:, :, : self.length] for stored in self._keys_and_values)
        return k_BGSC, v_BGSC

    def __repr__(self) -> str:
        return f"KeyValueCache(capacity={self.capacity}, length={self.length})"


def _check_fits(stored_BGSC: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    batch, heads, _, channels = stored_BGSC.shape
    if (batch, heads, channels) != (*shape[:2], shape[3]) or stored_BGSC.dtype != dtype:
        raise ValueError(
            f"the cache holds {stored_BGSC.dtype} [{batch}, {heads}, T, {channels}], "
            f"got {dtype} {list(shape)}; use a new cache for another batch or model"
        )
