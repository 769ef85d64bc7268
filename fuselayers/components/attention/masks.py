"""The keys that a query may look at: masks from the caller, and an attention's rules as a mask.

    mask        [B, H, T, S]   B batch, H heads, T queries, S keys; bool, True where a query may look at a key
    documents   [B, T]         the number of the document that a token belongs to
    layout      [N, N]         N blocks of tokens; True where a block of queries may look at a block of keys

Query t is at position first + t among the keys. It may attend to key s where all of these hold:

    causal              s <= first + t
    window              |first + t - s| < window
    key_padding_mask    True at s
    mask                True at (t, s)
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...ops.attention import block_diagonal_mask as block_diagonal_mask
from ..ranges import Range


class Rules(NamedTuple):
    """The allowed keys of a query, and the changes to its scores before the softmax.

    Attributes:
        scale: the factor of the scores.
        causal: whether a query looks only at its own position and those before it.
        window: the number of keys that a query looks at, its own included, on each side unless causal; None for all.
        first: the position of the first query among the keys.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them.
        sinks_H: a logit per head that joins the softmax, without a value; None for none.
        bias_HTS: added to the scores, after the cap.
        key_padding_mask: bool [B, S], True for a real token.
        mask: bool, broadcastable to [B, H, T, S], or a `BlockMask` of torch's flex attention.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    first: int = 0
    soft_cap: float | None = None
    sinks_H: Tensor | None = None
    bias_HTS: Tensor | None = None
    key_padding_mask: Tensor | None = None
    mask: Tensor | BlockMask | None = None

    def hides_future(self, keys: int) -> bool:
        """Whether the causal rule hides any of the keys. If the only query is the last token, it hides none."""
        return self.causal and self.first + 1 < keys

    def hides_far(self, keys: int) -> bool:
        """Whether the window hides any of the keys."""
        return self.window is not None and self.window < keys


def allowed_keys(rules: Rules, tokens: int, keys: int, device: torch.device) -> Tensor | None:
    """Return the rules as one mask, or None where every key is allowed.

    It is broadcastable to [B, H, T, S], and has a column for each key.

    >>> allowed_keys(Rules(1.0, causal=True, window=2), 3, 3, torch.device("cpu")).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    allowed: Tensor | None = None
    hides_future, hides_far = rules.hides_future(keys), rules.hides_far(keys)
    if hides_future and not hides_far:
        allowed = torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(rules.first)
    elif hides_far:
        assert rules.window is not None
        place_T1 = torch.arange(rules.first, rules.first + tokens, device=device)[:, None]
        gap_TS = place_T1 - torch.arange(keys, device=device)
        allowed = gap_TS < rules.window
        allowed = allowed & (gap_TS >= 0 if rules.causal else gap_TS > -rules.window)
    assert not isinstance(rules.mask, BlockMask)
    padding = None if rules.key_padding_mask is None else rules.key_padding_mask[:, None, None, :]
    for other in (padding, rules.mask):
        if other is not None:
            allowed = other if allowed is None else other & allowed
    # sdpa needs at least two dimensions, and a sink adds a column.
    return None if allowed is None else allowed.expand(*(allowed.shape[:-1] or (1,)), keys)


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


def check_mask(mask: Tensor | BlockMask, shape: tuple[int, int, int, int], *, kernel: str) -> None:
    """Raise ValueError unless a mask is bool and broadcastable to [B, H, T, S], or a `BlockMask` for kernel "flex"."""
    if isinstance(mask, BlockMask):
        if kernel != "flex":
            raise ValueError(
                f"a BlockMask needs the kernel 'flex', got {kernel!r}; set kernel='flex', or pass a tensor"
            )
        if mask.shape[-2:] != shape[-2:]:
            raise ValueError(f"a BlockMask must be for {list(shape[-2:])} tokens, got {list(mask.shape[-2:])}")
        return
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = len(padded) == 4 and all(got in (1, wanted) for got, wanted in zip(padded, shape, strict=True))
    if mask.dtype != torch.bool or not fits:
        raise ValueError(
            f"mask must be torch.bool and broadcastable to {list(shape)}, True where a query may look at a key, "
            f"got {mask.dtype} {list(mask.shape)}"
        )


def check_bias(bias: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise ValueError unless a bias is floating and [H, T, S]."""
    if bias.shape != shape or not bias.is_floating_point():
        raise ValueError(
            f"bias must be floating and {list(shape)} (heads, queries, keys), got {bias.dtype} {list(bias.shape)}"
        )
