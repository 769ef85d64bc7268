"""layout -- the part of a model and of its tensors that this process computes.

Components that a group of processes can divide have a `layout`. Without a group it is `WHOLE`, whose methods change
nothing; `parallelize` puts another layout in its place.

x        [B, T, D]   B batch, T tokens, D model
memory   [B, S, D]   the input of cross-attention
"""

from collections.abc import Callable
from typing import Final

from torch import Tensor

from ..ops import Shard


class Layout:
    """The layout of a process that computes the whole model.

    >>> import torch
    >>> WHOLE.shard(torch.ones(2, 3), -1) is None
    True
    """

    # Whether there are other processes.
    divided: bool = False

    def shard(self, x: Tensor, dim: int) -> Shard | None:
        """Return the position of x, this process's part along `dim`, in the whole tensor.

        Used for the hidden values of feedforwards and the heads of attentions. None if x is the whole.
        """
        return None

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's part along `dim` of a tensor that every process has."""
        return x

    def split_tokens(self, x_BTD: Tensor) -> tuple[Tensor, Shard | None]:
        """Return this process's tokens of the stream and their position in it; None if those are all tokens."""
        return x_BTD, None

    def join_tokens(self, x_BTD: Tensor, shard: Shard | None) -> Tensor:
        """Return the tokens of all processes; the inverse of `split_tokens`."""
        return x_BTD

    def around(self, sublayer: Callable[[Tensor], Tensor], shard: Shard | None) -> Callable[[Tensor], Tensor]:
        """Return a sublayer of the stream, from one whose result is this process's term of a sum.

        It adds the terms of all processes. If the stream's tokens are divided, its result has this process's tokens.

        Args:
            sublayer: takes all tokens.
            shard: as `split_tokens` returns it.
        """
        return sublayer

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x over the processes. Each computes the gradient of its own term."""
        return x

    def once(self, x: Tensor) -> Tensor:
        """Return x, which every process has computed. Backward takes the mean of their gradients, not the sum."""
        return x


WHOLE: Final = Layout()
