"""Attention in plain torch: the formula that autograd and compilers differentiate, and the op's reference.

The formula saves the weights [B, H, T, S] for backward; the kernels do not.
"""

import torch
from torch import Tensor

from ..dropout import dropout_reference
from ..elementwise import dropout_formula
from ..shards import Shard, positions

__all__ = ["allowed_keys", "attention_by_formula", "attention_reference", "bias_of_dtype", "bias_of_scores"]


def attention_by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    key_padding_mask: Tensor | None,
    mask: Tensor | None,
    documents: Tensor | None,
    seed: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    first: int,
    soft_cap: float | None,
    p: float,
    first_row: int,
    rows_of_batch: int,
    rows_of_head: int,
    first_column: int,
) -> Tensor:
    """Return the op's result. The arguments are those of the registered ops; see `registered`."""
    batch, heads, tokens, _ = q.shape
    groups, keys = k.shape[1:3]
    # The R query heads that share keys become additional queries, so that keys and values are not copied. The queries
    # are scaled, since they are usually smaller than the scores.
    q_BGXC = torch.unflatten(q * scale, 1, (groups, heads // groups)).flatten(2, 3)  # X = R x T
    scores_BHTS = (q_BGXC @ k.transpose(-2, -1)).reshape(batch, heads, tokens, keys)
    if soft_cap is not None:
        scores_BHTS = soft_cap * torch.tanh(scores_BHTS / soft_cap)
    allowed = allowed_keys(key_padding_mask, mask, documents, causal, window, first, tokens, keys, q.device)
    if bias is not None:
        bias = bias_of_scores(bias_of_dtype(bias, scores_BHTS.dtype), keys)
        scores_BHTS = scores_BHTS + bias
        allowed = ~bias.isneginf() if allowed is None else allowed & ~bias.isneginf()
    if allowed is not None:
        # A row without any allowed key would be 0 / 0, also in backward. Its scores become 0, and then its weights.
        empty = ~allowed.any(-1, keepdim=True)
        scores_BHTS = torch.where(allowed, scores_BHTS, torch.where(empty, 0.0, -torch.inf).to(scores_BHTS.dtype))
    if sinks is not None:
        sink_BHT1 = sinks.to(scores_BHTS.dtype)[:, None, None].expand(batch, heads, tokens, 1)
        scores_BHTS = torch.cat((scores_BHTS, sink_BHT1), dim=-1)
    weights_BHTS = scores_BHTS.softmax(-1)
    if sinks is not None:
        weights_BHTS = weights_BHTS[..., :-1]
    if allowed is not None:
        weights_BHTS = weights_BHTS.masked_fill(empty, 0.0)
    if seed is not None:
        row_R = None
        if rows_of_head:
            steps = ((batch, rows_of_batch), (heads, rows_of_head), (tokens, 1))
            b, h, t = (positions(0, size, device=q.device) * step for size, step in steps)
            row_R = (first_row + b[:, None, None] + h[:, None] + t).flatten()
        weights_BHTS = dropout_formula(weights_BHTS, seed, row_R, first_column, p)
    weights_BGXS = torch.unflatten(weights_BHTS, 1, (groups, heads // groups)).flatten(2, 3)
    return (weights_BGXS @ v).reshape(batch, heads, tokens, v.shape[-1])


def bias_of_dtype(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias in a dtype, a finite number as a finite one: models write masks with the lowest number.

    >>> bias_of_dtype(torch.tensor([torch.finfo(torch.float32).min, -torch.inf]), torch.float16)
    tensor([-65504.,    -inf], dtype=torch.float16)
    """
    limit = torch.finfo(dtype).max
    if torch.finfo(bias.dtype).max > limit:
        bias = torch.where(bias.isinf(), bias, bias.clamp(-limit, limit))
    return bias.to(dtype)


def bias_of_scores(bias: Tensor, keys: int) -> Tensor:
    """Return a bias of the registered ops as one of the scores: a table of distances becomes [1, H, T, S].

    >>> bias_of_scores(torch.tensor([[-1, 0, 1, 2]]), 3)
    tensor([[[[ 0,  1,  2],
              [-1,  0,  1]]]])
    """
    # Row t is a window of the distances, which starts one distance before the window of the previous query.
    return bias if bias.dim() == 4 else bias.unfold(-1, keys, 1).flip(-2)[None]


def allowed_keys(
    key_padding_mask: Tensor | None,
    mask: Tensor | None,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    first: int,
    tokens: int,
    keys: int,
    device: torch.device,
) -> Tensor | None:
    """Return the rules as one mask, broadcastable to [B, H, T, S] and with a column for each key; None hides nothing.

    >>> allowed_keys(None, None, None, True, 2, 0, 3, 3, torch.device("cpu")).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    allowed: Tensor | None = None
    hides_future = causal and first + 1 < keys
    hides_far = window is not None and (window < keys or window < first + tokens)
    if hides_future and not hides_far:
        allowed = torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(first)
    elif hides_far:
        assert window is not None
        place_T1 = torch.arange(first, first + tokens, device=device)[:, None]
        gap_TS = place_T1 - torch.arange(keys, device=device)
        allowed = gap_TS < window
        allowed = allowed & (gap_TS >= 0 if causal else gap_TS > -window)
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
    same = None
    if documents is not None:
        same = (documents[:, first : first + tokens, None] == documents[:, None])[:, None]
    for other in (padding, same, mask):
        if other is not None:
            allowed = other if allowed is None else other & allowed
    # sdpa needs at least two dimensions, and a sink adds a column.
    return None if allowed is None else allowed.expand(*(allowed.shape[:-1] or (1,)), keys)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    first: int = 0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """The definition of the op in training, in plain torch; without a seed nothing is dropped."""
    repeats, tokens, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    scores = scores if bias is None else scores + bias_of_dtype(bias, scores.dtype)
    place, key = first + torch.arange(tokens, device=q.device)[:, None], torch.arange(keys, device=q.device)
    if distance_bias is not None:
        scores = scores + bias_of_dtype(distance_bias, scores.dtype)[:, key - place + first + tokens - 1]
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        allowed &= key <= place
    if window is not None:
        allowed &= (place - key).abs() < window
    if key_padding_mask is not None:
        allowed &= key_padding_mask[:, None, None]
    if mask is not None:
        allowed &= mask
    if documents is not None:
        allowed &= (documents[:, place] == documents[:, None])[:, None]
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    empty = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :keys]
    weights = weights if seed is None else dropout_reference(weights, p, seed=seed, shard=shard)
    return weights @ v
