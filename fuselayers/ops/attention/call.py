"""attention -- every query takes a weighted mean of the values of its allowed keys.

    q          [B, H, T, C]   B batch, H query heads, T queries, C channels of a head
    k          [B, G, S, C]   G key-value heads, S keys; query head h uses key-value head h // (H / G)
    v          [B, G, S, E]   E channels of a value
    y          [B, H, T, E]
    bias       broadcastable to [B, H, T, S], or as distance_bias [H, T + S - 1]: entry s - t + T - 1 for query t, key s
    sinks      [H]

    forward    score  = scale q k^T;   soft_cap tanh(score / soft_cap);   + bias
               weight = exp(score) / (exp(sink) + sum over the allowed keys of exp(score))
               y      = dropout(weight) v
    backward   the weights are computed again, from q, k and the logarithm of that denominator

Query t is at position first + t among the keys. It looks at key s where all of these hold:

    causal              s <= first + t
    window              |first + t - s| < window
    key_padding_mask    True at s
    mask                True at (t, s)
    documents           equal at s and at first + t

A query without any allowed key gets zeros, and has zero gradients. The arithmetic of the kernels is float32. Those of a
GPU take heads whose tiles fit in its shared memory: on an H100 of 512 channels in 16 bits and 256 in float32, on an
A100 and an MI300X of half as many.

Saved for backward: q, k, v, y, one number per query and a seed; never a tensor of [T, S] that the caller did not pass.
Dropout's mask is that of `dropout` of the weights [B, H, T, S]. The formula saves the weights.

Time grows with the pairs of a query and an allowed key: blocks of keys that no query of a block looks at are skipped.

Online softmax: Milakov, Gimelshein 2018; tiles and backward: Dao, "FlashAttention-2", 2023. Soft cap: Gemma Team 2024,
section 2; sinks: OpenAI, "gpt-oss model card", 2025, section 2.
"""

import functools
import math
from typing import Any, Final

import torch
from torch import Tensor

from ..._torch.dispatch import tangents_are_active
from ..draw import seed_or_draw
from ..implementations import (
    Op,
    autocast_dtype,
    backward_takes_formula,
    differentiable,
    gradients_by_formula,
    needs_grad,
)
from ..shapes import check_floating
from ..shards import Shard, check_shard
from .by_torch import attention_by_torch
from .formula import attention_by_formula
from .kernels import why_too_wide
from .registered import attention_backward, attention_forward

__all__ = ["attention"]

# The kernels take 32 queries at a time, and a call takes 20 us more than one of torch. Forward at (1, 8, T, 64) with
# 512 keys, T = 8 and 16: 133 and 152 us, torch 127 and 216. Forward and backward at (2, 4, 32, 32): 135 us, torch 97;
# at (8, 4, 64, 32): 472, torch 879 (one core of an AMD EPYC, AVX-512).
_FEW_QUERIES: Final = 16
_SMALL: Final = 1 << 20  # products of a query's and a key's channels
_FURTHEST: Final = 1 << 31  # kernels count the keys between a query and a key in 32 bits


def attention(
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
    training: bool = True,
    seed: Tensor | None = None,
    shard: Shard | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the result of every query, [B, H, T, E].

    Under autocast queries, keys and values are cast to its dtype, as for torch's own attention.

    Args:
        q: [B, H, T, C], any float dtype. Strided heads of a packed projection are read in place.
        k: [B, G, S, C], of q's dtype, H a multiple of G.
        v: [B, G, S, E], of q's dtype.
        scale: the factor of the scores; None for 1 / sqrt(C).
        causal: whether a query looks only at its own position and those before it.
        window: a query looks at keys less than `window` positions away, so 1 leaves its own; None for all.
        first: the position of the first query among the keys, for example the length of a cache.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them.
        sinks: [H], a logit per head that joins the softmax, without a value.
        bias: floating, broadcastable to [B, H, T, S], added to the scores after the cap; -inf hides a key.
        distance_bias: floating [H, T + S - 1], in place of `bias`, where that depends only on the distance of a query
            and a key: the first entry is for the last query and the first key, the last one for the first query and the
            last key.
        key_padding_mask: bool [B, S], True for a real token.
        mask: bool, broadcastable to [B, H, T, S], True where a query may look at a key.
        documents: integers [B, S], the number of each key's document; the queries belong to those from `first` on.
        p: probability of dropping a weight, 0 <= p <= 1.
        training: False drops nothing.
        seed: int64 tensor of shape [] on q's device, which fixes the mask; drawn from torch's generator when None.
        shard: the position of the weights [B, H, T, S] in a larger tensor, whose mask they use; None for the whole.
        backend: see `fuselayers.ops.implementations.dispatch`; "eager" saves the weights. "auto" calls torch's
            `scaled_dot_product_attention` where no kernel of this library runs and nothing is dropped or capped, and
            on a CPU for fewer than 16 queries, or sizes [B, H, T, S, C] of a product below 2^20, without sinks and
            gradients of the bias. Torch's has no second derivative; the others have.

    Raises:
        ValueError: a tensor, the seed or the shard does not fit q, p is outside [0, 1], another number is out of its
            range, or the backend is unknown.
        TypeError: a tensor is not dense and floating, the seed is not a tensor, p is a tensor, or `shard` is not a
            Shard.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or the
            requested backend cannot take the call.

    >>> q, k, v = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 3, 2), torch.arange(6.0).view(1, 1, 3, 2)
    >>> attention(q, k, v, window=2)
    tensor([[[[1., 2.]]]])
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks), ("bias", bias), ("distance_bias", distance_bias)):
        if x is not None:
            check_floating(name, x)
    dtype = autocast_dtype(q.device)
    if dtype is not None:
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    shape = _check(q, k, v)
    _check_numbers(scale, window, first, soft_cap)
    if window is not None and window >= 2 * _FURTHEST:
        window = None  # all keys are nearer, and a sum with sys.maxsize would overflow
    if bias is not None:
        bias = _as_scores("bias", bias, shape)
    if distance_bias is not None:
        if bias is not None:
            raise ValueError(
                "attention takes a bias or a distance_bias, got both; add distance_bias.unfold(-1, keys, 1).flip(-2) "
                "to the bias"
            )
        bias = _as_table(distance_bias, shape)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be torch.bool, True where a query may look at a key, got {mask.dtype}")
        mask = _as_scores("mask", mask, shape)
    _check_rules(sinks, key_padding_mask, documents, first, shape)
    for name, x in (("bias", bias), ("sinks", sinks), ("key_padding_mask", key_padding_mask), ("mask", mask)):
        _check_device(name, x, q)
    _check_device("documents", documents, q)
    seed = seed_or_draw(q, p, training=training, seed=seed)
    p = 0.0 if seed is None else p
    check_shard(shard, shape)
    position = (0, 0, 0, 0)
    if shard is not None and seed is not None:
        (b, h, t, s), (_, heads, tokens, _) = shard.start, shard.shape
        position = ((b * heads + h) * tokens + t, heads * tokens, tokens, s)
    tensors = q, k, v, bias, sinks, key_padding_mask, mask, documents, seed
    options: Any = q.shape[-1] ** -0.5 if scale is None else scale, causal, window, first, soft_cap, p, *position
    reason = None
    if position[3] % 8:
        reason = f"its shard begins at column {position[3]}, which is not a multiple of 8"
    if backend == "eager":
        return attention_by_formula(*tensors, *options)
    if backend == "cpp" and reason:
        raise RuntimeError(f"backend 'cpp' cannot take this call: {reason}; use backend='auto' or 'eager'")
    if backend == "triton" or q.is_cuda:
        reason = reason or why_too_wide(q, v)
    if backend == "auto" and (reason or _torch_is_faster(*tensors, window, soft_cap)):
        return _in_torch(*tensors, *options)
    y: Tensor = _op(backend, tensors, options, unsupported_reason=reason)
    return y


def _check(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Raise unless queries, keys and values fit each other; return the shape of the scores."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, channels], got {list(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}; convert it with .to(q.dtype)")
        _check_device(name, x, q)
    (batch, heads, tokens, channels), (_, groups, keys, _) = q.shape, k.shape
    if not channels:
        raise ValueError(f"q must have at least one channel, got {list(q.shape)}")
    if k.shape[0] != batch or k.shape[3] != channels:
        raise ValueError(f"k must be [{batch}, heads, keys, {channels}] to fit q {list(q.shape)}, got {list(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must be {[*k.shape[:3]]} and channels to fit k {list(k.shape)}, got {list(v.shape)}")
    if not (heads and groups) or heads % groups:
        raise ValueError(f"q's heads must be a multiple of k's, at least one, got {heads} and {groups}")
    return batch, heads, tokens, keys


def _check_device(name: str, x: Tensor | None, q: Tensor) -> None:
    if x is not None and x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}; move it with .to(q.device)")


def _check_numbers(scale: float | None, window: int | None, first: int, soft_cap: float | None) -> None:
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, or None for 1 / sqrt(channels), got {scale}")
    if window is not None and (isinstance(window, float) or window < 1):
        raise ValueError(f"window must be a whole number of at least 1, or None for all keys, got {window}")
    if isinstance(first, float) or not 0 <= first < _FURTHEST:
        raise ValueError(f"first must be a whole number of at least 0 and less than 2^31, got {first}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap must be above 0 and finite, or None for no cap, got {soft_cap}")


def _as_scores(name: str, x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return x, which broadcasts to `shape`, with four dimensions and a column for each key."""
    sizes = (*(1,) * (4 - x.dim()), *x.shape)
    if len(sizes) != 4 or any(size not in (1, wanted) for size, wanted in zip(sizes, shape, strict=True)):
        raise ValueError(f"{name} must be broadcastable to {list(shape)}, got {list(x.shape)}")
    return x.reshape(sizes).expand(-1, -1, -1, shape[-1])


def _as_table(distance_bias: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return the bias of distances as the registered ops take it."""
    _, heads, tokens, keys = shape
    distances = max(tokens + keys - 1, 0)
    if distance_bias.shape != (heads, distances):
        raise ValueError(
            f"distance_bias must be [{heads}, {distances}], for each head the distances of {tokens} queries and {keys} "
            f"keys, got {list(distance_bias.shape)}"
        )
    # Without queries or keys a table still has entries, which no score reads.
    return distance_bias if tokens and keys else distance_bias[:, :0].reshape(1, heads, tokens, keys)


def _check_rules(
    sinks: Tensor | None,
    key_padding_mask: Tensor | None,
    documents: Tensor | None,
    first: int,
    shape: tuple[int, int, int, int],
) -> None:
    batch, heads, tokens, keys = shape
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], one for each query head, got {list(sinks.shape)}")
    if key_padding_mask is not None and (
        key_padding_mask.shape != (batch, keys) or key_padding_mask.dtype != torch.bool
    ):
        raise ValueError(
            f"key_padding_mask must be torch.bool [{batch}, {keys}], True for a real token, "
            f"got {key_padding_mask.dtype} {list(key_padding_mask.shape)}"
        )
    if documents is not None:
        if documents.shape != (batch, keys) or documents.is_floating_point() or documents.is_complex():
            raise ValueError(
                f"documents must be integers [{batch}, {keys}], the number of each key's document, "
                f"got {documents.dtype} {list(documents.shape)}"
            )
        if first + tokens > keys:
            raise ValueError(
                f"documents need a key for each query, got {tokens} queries from {first} on, and {keys} keys"
            )


def _torch_is_faster(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    key_padding_mask: Tensor | None,
    mask: Tensor | None,
    documents: Tensor | None,
    seed: Tensor | None,
    window: int | None,
    soft_cap: float | None,
) -> bool:
    """Return whether torch's own attention takes a call, and is faster than this library's kernels."""
    if seed is not None or soft_cap is not None or sinks is not None:
        return False
    if not q.is_cpu:  # torch's fused kernels; with these rules they would read a mask or a bias of all pairs
        return window is None and documents is None and (bias is None or bias.dim() == 4)
    if needs_grad(bias):
        return False
    batch, heads, tokens, channels = q.shape
    sizes = batch, heads, tokens, channels, k.shape[2]
    # A condition on a symbolic size would become a guard.
    return all(isinstance(size, int) for size in sizes) and (tokens < _FEW_QUERIES or math.prod(sizes) < _SMALL)


@functools.wraps(attention_by_formula)
def _in_torch(*arguments: Any) -> Tensor:
    """Return the op's result without a kernel of this library."""
    seed, scale, causal, window, first, soft_cap = arguments[8:14]
    # Torch's attention has no derivative in forward mode.
    if seed is not None or soft_cap is not None or tangents_are_active():
        return attention_by_formula(*arguments)
    by_torch: Any = attention_by_torch
    y: Tensor = by_torch(*arguments[:8], scale, causal, window, first)
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        y: Tensor
        y, lse = attention_forward(*arguments)
        ctx.save_for_backward(*arguments[:9], y, lse)
        ctx.options = arguments[9:]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, y, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:5]
        gradients: list[Tensor | None]
        if backward_takes_formula():

            def formula(*inputs: Any) -> Tensor:
                return attention_by_formula(*inputs, *tensors[5:], *ctx.options)

            gradients = gradients_by_formula(formula, tensors[:5], dy, wanted)
        else:
            gradients = attention_backward(dy, *tensors[:3], y, lse, *tensors[3:], *ctx.options, wanted[3])
        used = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        return *used, *(None,) * (4 + len(ctx.options))


_op = Op(
    "attention",
    _in_torch,
    differentiable(_Attention, lambda *call: attention_forward(*call)[0]),
    cpu_from=0,
    in_graphs=True,
)
