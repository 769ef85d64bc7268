"""Masks for an attention; `ops.attention` says how they act with its other rules.

mask     [B, H, T, S]   B batch, H heads, T queries, S keys; bool, True where a query may look at a key
layout   [N, N]         N blocks of tokens; True where a block of queries may look at a block of keys
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..option import Range


def block_mask(layout_NN: Tensor, block_size: int) -> Tensor:
    """Return the mask of a layout of blocks: each entry of the layout applies to all token pairs of its block.

    Args:
        layout_NN: bool [N, N], or [H, N, N] with a layout for each head.
        block_size: the number of tokens in a block.

    Returns:
        bool [N * block_size, N * block_size], with the heads in front if the layout has them.

    Raises:
        ValueError: the layout has another shape or dtype, or the block size is below one.

    >>> block_mask(torch.tensor([[True, False], [True, True]]), 2).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 1],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    Range(minimum=1).check("block_size", block_size)
    shape = layout_NN.shape
    if layout_NN.dtype != torch.bool or layout_NN.dim() not in (2, 3) or shape[-1] != shape[-2]:
        raise ValueError(f"layout must be torch.bool [N, N] or [H, N, N], got {layout_NN.dtype} {list(shape)}")
    return layout_NN.repeat_interleave(block_size, -2).repeat_interleave(block_size, -1)


def check_block_mask(
    mask: Tensor | BlockMask | None, documents: Tensor | None, tokens: int, keys: int, *, kernel: str
) -> None:
    """Raise ValueError for a `BlockMask` of other sizes, with documents, or without the kernel "flex"."""
    if not isinstance(mask, BlockMask):
        return
    if kernel != "flex":
        raise ValueError(f"a BlockMask needs the kernel 'flex', got {kernel!r}; set kernel='flex', or pass a tensor")
    if mask.shape[-2:] != (tokens, keys):
        raise ValueError(f"a BlockMask must be for {[tokens, keys]} tokens, got {list(mask.shape[-2:])}")
    if documents is not None:
        raise ValueError("documents cannot be added to a BlockMask; put the documents into the BlockMask")
