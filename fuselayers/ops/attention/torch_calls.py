"""torch's own attentions by `attention`. Used by swapped modules and fused graphs."""

import types
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draw import draw_seed
from ..dropout import dropout
from ..implementations import runs_cpp
from ..philox import keep_mask, keep_scale
from .call import attention

__all__ = ["attention_of_torch_call", "multi_head_of_torch_call"]


def attention_of_torch_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `F.scaled_dot_product_attention` by `attention`, where that drops or has kernels for a CPU.

    Every call that drops has the mask of `attention`, on every device. Of the others, those that the kernels do not
    take go to torch.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> attention_of_torch_call(x, x, x, is_causal=True).shape
    torch.Size([1, 1, 3, 2])
    """
    drops = 0 < dropout_p < 1
    fits = _fits(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if fits and (drops or runs_cpp((query, key, value, attn_mask))):
        is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
        heads = (x if x.dim() == 4 else x[None] for x in (query, key, value))
        y = attention(
            *heads,
            scale=scale,
            causal=is_causal,
            mask=attn_mask if is_bool else None,
            bias=None if is_bool else attn_mask,
            p=dropout_p,
        )
        return y if query.dim() == 4 else y[0]
    options: Any = {"scale": scale, "enable_gqa": enable_gqa}
    if not drops or query.layout != torch.strided:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    # Shapes that broadcast, for which torch's fused kernels save the probabilities too.
    keep = keep_mask(draw_seed(device=query.device), (*query.shape[:-1], key.shape[-2]), p=dropout_p)
    by_formula = torch.ops.aten._scaled_dot_product_attention_math
    p = 1 - 1 / keep_scale(dropout_p)
    dropped: Tensor = by_formula(query, key, value, attn_mask, p, is_causal, keep, **options)[0]
    return dropped


def _multi_head() -> Callable[..., Any]:
    """Return torch's function, which finds other functions under three names."""
    torchs = F.multi_head_attention_forward
    names = {
        "scaled_dot_product_attention": attention_of_torch_call,
        "dropout": dropout,
        "has_torch_function": lambda tensors: False,  # True while AOTAutograd traces: it would call the original
    }
    own = types.FunctionType(torchs.__code__, vars(F) | names, "multi_head_of_torch_call", torchs.__defaults__)
    own.__kwdefaults__, own.__module__ = torchs.__kwdefaults__, __name__
    return own


# `nn.MultiheadAttention` and torch's layers of a transformer call it. It drops in its attention, or if it returns the
# weights, by itself.
multi_head_of_torch_call: Final = _multi_head()
"""`F.multi_head_attention_forward`, with the attention and the dropout of this library inside."""


def _fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Return whether a call has one dtype, and shapes that do not broadcast; torch raises for wrong ones."""
    dims = query.dim()
    if not (dims == key.dim() == value.dim() and dims in (3, 4) and query.dtype == key.dtype == value.dtype):
        return False
    grouped = dims == 4 and enable_gqa and query.shape[1] % max(key.shape[1], 1) == 0
    alike = key.shape[:-1] == value.shape[:-1] and query.shape[-1] == key.shape[-1] and query.shape[-1] > 0
    alike = alike and query.shape[:-3] == key.shape[:-3] and (grouped or query.shape[-3] == key.shape[-3])
    if not (alike and 0 <= dropout_p < 1 and query.layout == key.layout == value.layout == torch.strided):
        return False
    if attn_mask is None:
        return True
    scores = (*query.shape[:-1], key.shape[-2])
    sizes = (*(1,) * (len(scores) - attn_mask.dim()), *attn_mask.shape)
    broadcasts = len(sizes) == len(scores) and all(
        size in (1, wanted) for size, wanted in zip(sizes, scores, strict=True)
    )
    return broadcasts and not is_causal and attn_mask.dtype in (torch.bool, query.dtype)
