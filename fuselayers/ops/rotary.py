"""rotary -- rotary position embedding of queries and keys.

    q          [B, H, T, C]           B batch, H query heads, T tokens, C channels of a head
    k          [B, G, T, C]           G key heads
    cos, sin   [T, R] or [B, T, R]    of position * frequency, for R pairs of channels, 2 R <= C

    forward    (a, b) -> (a cos - b sin, b cos + a sin) for each pair; channels from 2 R on are copied
    backward   the same with -sin

Pair i is channels (i, i + R), as in GPT-NeoX and Llama, or (2 i, 2 i + 1) where they are interleaved, as in RoFormer
and GPT-J. GPT-NeoX and Phi rotate only a part of the channels.

The rotation is computed in the wider of x's and cos's dtypes, float32 at least, and rounded to x's once. Saved for
backward: cos and sin, and q and k only where cos or sin needs a gradient.

Bytes moved, in elements of q and k: 2 forward (read, write), 2 backward. The kernel needs one launch (two where
the dtypes differ), and reads the tables once for every `_HEADS` heads. It reads q and k through their strides. The
results are dense, in the same order of heads and tokens as q and k: for heads cut out of a projection [B, T, H * C]
that is the layout of flash attention, and the gradient of the projection is a view.

Su et al., "RoFormer", 2021.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .._torch.dispatch import is_batched_gradient, is_compiling, transforms_are_active
from .cpu import Heads, pointer, run
from .implementations import Op, define, in_cpp, needs_grad
from .implementations.launch import kernel, launch, num_processors
from .implementations.triton_language import tile_function, tl
from .rows import cdiv, next_power_of_2
from .shapes import check_floating

__all__ = ["rotary", "rotary_reference"]

# Elements per tile of a program with four warps: 16 per thread, in 16 bits two loads of 128 bits.
_TILE: Final = 2048
# Heads for which a program reuses the tables in registers.
_HEADS: Final = 8


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (q, k), each position rotated by its angles; each keeps its dtype.

    Args:
        q: [B, H, T, C], any float dtype. Any leading shape is valid, also [T, C].
        k: [B, G, T, C], as q except for the number of heads and the dtype.
        cos: [T, R], usually float32, R from 1 to C / 2; or [B, T, R], with q's leading shape without the heads.
        sin: of cos's shape and dtype.
        interleaved: True if pair i is channels (2 i, 2 i + 1), False if it is (i, i + R).
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: q has fewer than two dimensions, a shape or a device does not fit q, sin's dtype is not cos's, or
            the backend is unknown.
        TypeError: a tensor is not dense and floating.
        RuntimeError: the requested backend cannot take the call.

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> quarter_turn = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotary(q, q, *quarter_turn)[0].flatten()
    tensor([0., 1.])
    """
    _check(q, k, cos, sin)
    rotated: tuple[Tensor, Tensor] = _op(backend, (q, k, cos, sin), (interleaved,))
    return rotated


def _formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if cos.dim() > 2:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    q_BHTC, k_BGTC = _as_heads(q), _as_heads(k)
    cos, sin = (table if table.dim() < 4 else table.flatten(0, -3) for table in (cos, sin))
    token_major = [x.stride(1) < x.stride(2) for x in (q_BHTC, k_BGTC)]
    turned_q, turned_k = _rotated([q_BHTC, k_BGTC], cos, sin, interleaved, False, token_major)
    return (turned_q, turned_k) if q.dim() == 4 else (turned_q.view(q.shape), turned_k.view(k.shape))


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_floating(name, tensor)
        if tensor.device != q.device:
            raise ValueError(
                f"{name} must be on q's device {q.device}, got {tensor.device}; move it with .to(q.device)"
            )
    if q.dim() < 2:
        raise ValueError(f"q must be [..., T, C], tokens by channels, got {list(q.shape)}")
    tokens, channels = q.shape[-2:]
    if channels < 2:
        raise ValueError(f"rotary needs at least two channels per head, got q {list(q.shape)}")
    if k.shape[-2:] != q.shape[-2:]:
        raise ValueError(f"k must end in {[tokens, channels]} to fit q {list(q.shape)}, got {list(k.shape)}")
    if k.dim() != q.dim() or k.shape[:-3] != q.shape[:-3]:
        wanted = _listed(*q.shape[:-3], *(["heads"] if q.dim() > 2 else []), tokens, channels)
        raise ValueError(f"k must be {wanted} to fit q {list(q.shape)}, got {list(k.shape)}")
    leading = q.shape[:-3]
    if cos.shape[:-1] not in ((tokens,), (*leading, tokens)) or not 1 <= cos.shape[-1] <= channels // 2:
        wanted = _listed(tokens, "R") + (f" or {_listed(*leading, tokens, 'R')}" if leading else "")
        raise ValueError(
            f"cos must be {wanted}, R from 1 to {channels // 2}, to fit q {list(q.shape)}, got {list(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have cos's shape {list(cos.shape)}, got {list(sin.shape)}")
    if sin.dtype != cos.dtype:
        raise ValueError(f"sin must have cos's dtype {cos.dtype}, got {sin.dtype}; convert it with .to(cos.dtype)")


def _listed(*sizes: int | str) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _as_heads(x: Tensor) -> Tensor:
    """Return x, [..., T, C], as [B, H, T, C]."""
    if x.dim() == 4:
        return x
    return x.reshape(math.prod(x.shape[:-3]), x.shape[-3] if x.dim() > 2 else 1, *x.shape[-2:])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x by tables that broadcast against it."""
    width = 2 * cos.shape[-1]
    first, second = _pairs(x, cos, interleaved)
    turned = first * cos - second * sin, second * cos + first * sin
    # Not flatten, which does not support batched gradients.
    y = torch.stack(turned, -1).reshape(*x.shape[:-1], width) if interleaved else torch.cat(turned, dim=-1)
    y = y.to(x.dtype)
    return y if width == x.shape[-1] else torch.cat((y, x[..., width:]), dim=-1)


def _pairs(x: Tensor, cos: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return both channels of each rotated pair, [..., T, R], in the dtype of the arithmetic."""
    width = 2 * cos.shape[-1]
    x = (x if width == x.shape[-1] else x[..., :width]).to(_wide(x, cos))
    first, second = x.reshape(*x.shape[:-1], cos.shape[-1], 2).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return first, second


def _wide(x: Tensor, cos: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)


def rotary_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition of the op: each pair of channels times its rotation matrix."""
    turn_TR22 = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    turn_TR22 = turn_TR22 if cos.dim() == 2 else turn_TR22.unsqueeze(-5)
    num_pairs = cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        still = x[..., 2 * num_pairs :]
        shape = (num_pairs, 2) if interleaved else (2, num_pairs)
        pairs = x[..., : 2 * num_pairs].reshape(*x.shape[:-1], *shape).to(_wide(x, cos))
        pairs = pairs if interleaved else pairs.mT
        products = (turn_TR22 * pairs[..., None, :]).sum(-1)
        return torch.cat(((products if interleaved else products.mT).flatten(-2).to(x.dtype), still), dim=-1)

    return turned(q), turned(k)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, interleaved: bool, back: bool, token_major: list[bool], cos: Tensor, sin: Tensor, *heads: Tensor
    ) -> tuple[Tensor, ...]:
        saves_heads = any(ctx.needs_input_grad[3:5])
        ctx.save_for_backward(cos, sin, *(heads if saves_heads else ()))
        ctx.options = interleaved, back, token_major
        ctx.set_materialize_grads(False)
        return tuple(_rotate_heads(heads, cos, sin, interleaved, back, token_major))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Any, ...]:
        cos, sin, *heads = ctx.saved_tensors
        interleaved, back, token_major = ctx.options
        _, _, _, wants_cos, wants_sin, *wants = ctx.needs_input_grad
        incoming = {index: gradient for index, gradient in enumerate(dy) if gradient is not None and wants[index]}
        gradients: list[Tensor | None] = [None] * len(dy)
        if incoming:
            orders = [token_major[index] for index in incoming]
            rotated_back = _rotated(list(incoming.values()), cos, sin, interleaved, not back, orders)
            for index, gradient in zip(incoming, rotated_back, strict=True):
                gradients[index] = gradient
        dcos = dsin = None
        if wants_cos or wants_sin:
            dcos, dsin = _table_gradients(heads, dy, cos, interleaved, back)
        return None, None, None, dcos if wants_cos else None, dsin if wants_sin else None, *gradients


def _rotated(
    heads: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, back: bool, token_major: list[bool]
) -> Sequence[Tensor]:
    """Rotate heads [B, H, T, C], or rotate them back; `token_major` gives the memory order of the results.

    The gradient of a rotation is a rotation, so it is differentiable any number of times.
    """
    # Backward may run in a transform or on batched gradients, and torch has no batching rule for an op with a list.
    if (not is_compiling() and transforms_are_active()) or any(map(is_batched_gradient, heads)):
        tables = cos.unsqueeze(-3), (-sin if back else sin).unsqueeze(-3)
        return [_rotate(x, *tables, interleaved) for x in heads]
    if needs_grad(cos, sin, *heads):
        recorded: Sequence[Tensor] = _Rotary.apply(interleaved, back, token_major, cos, sin, *heads)  # type: ignore[no-untyped-call]
        return recorded
    turned: Sequence[Tensor] = _rotate_heads(heads, cos, sin, interleaved, back, token_major)
    return turned


def _table_gradients(
    heads: Sequence[Tensor], dy: Sequence[Tensor | None], cos: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin, summed over heads and over sequences that share a table."""
    shared = (0, 1) if cos.dim() == 2 else (1,)
    dcos = dsin = torch.zeros_like(cos, dtype=_wide(cos, cos))
    for x, gradient in zip(heads, dy, strict=True):
        if gradient is not None:
            (a, b), (da, db) = _pairs(x, cos, interleaved), _pairs(gradient, cos, interleaved)
            dcos = dcos + (a * da + b * db).sum(shared)
            dsin = dsin + (a * db - b * da).sum(shared)
    return dcos.to(cos.dtype), (-dsin if back else dsin).to(cos.dtype)


def _launch(
    heads: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, back: bool, token_major: list[bool]
) -> list[Tensor]:
    if len({x.dtype for x in heads}) > 1:
        one_by_one = zip(heads, token_major, strict=True)
        return [_launch([x], cos, sin, interleaved, back, [order])[0] for x, order in one_by_one]
    results = _empty_results(heads, cos, sin, interleaved, back, token_major)
    if not any(y.numel() for y in results):
        return results
    if in_cpp(cos):
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        for x, y in zip(heads, results, strict=True):
            x = x if x.stride(-1) == 1 else x.contiguous()
            run(
                "rotary",
                *(Heads.of(x), Heads.of(y), pointer(cos), pointer(sin), cos.stride(0) if cos.dim() == 3 else 0),
                *(*x.shape, cos.shape[-1], interleaved, back),
            )
        return results
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    # A single tensor is passed as the second one too, with zero heads.
    num_heads = [x.shape[1] for x in heads] + [0]
    x0, x1 = (x if x.stride(3) == 1 else x.contiguous() for x in (heads[0], heads[-1]))
    y0, y1 = results[0], results[-1]
    batch, _, tokens, channels = x0.shape
    num_pairs = cos.shape[-1]
    rest = channels - 2 * num_pairs
    strides = [stride for tensor in (x0, x1, y0, y1) for stride in tensor.stride()[:3]]
    strides += [cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2)]
    vector = math.gcd(8, num_pairs, rest, *strides)
    block_rows = max(min(_TILE, _TILE // 4 * vector) // channels, 1)
    num_tiles = cdiv(batch * tokens, block_rows)
    heads_per_program = _HEADS
    # For few tokens, as in decoding, more programs matter more than fewer reads of the tables.
    while heads_per_program > 1 and num_tiles * cdiv(sum(num_heads), heads_per_program) < 4 * num_processors(x0.device):
        heads_per_program //= 2
    launch(
        _kernel,
        (num_tiles, sum(cdiv(number, heads_per_program) for number in num_heads)),
        (
            *(x0, x1, y0, y1, cos, sin),
            *(batch * tokens, tokens, *num_heads[:2]),
            *(stride // vector for stride in strides),
        ),
        (
            *(interleaved, back, num_pairs, rest, vector, heads_per_program, block_rows),
            next_power_of_2(block_rows * (num_pairs // vector)),
            next_power_of_2(block_rows * (rest // vector)),
        ),
    )
    return results


def _empty_results(heads: list[Tensor], *rest: Any) -> list[Tensor]:
    orders = [(0, 2, 1, 3) if token_major else (0, 1, 2, 3) for token_major in rest[-1]]
    return [x.new_empty(x.permute(order).shape).permute(order) for x, order in zip(heads, orders, strict=True)]


# The widths are constants: a model has one head size, and constant masks and divisions are free.
@kernel
def _kernel(  # type: ignore[no-untyped-def]
    x0_ptr,
    x1_ptr,
    y0_ptr,
    y1_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    num_tokens,
    x0_heads,
    x1_heads,
    x0_batch,
    x0_head,
    x0_token,
    x1_batch,
    x1_head,
    x1_token,
    y0_batch,
    y0_head,
    y0_token,
    y1_batch,
    y1_head,
    y1_token,
    table_batch,
    table_token,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    REST: tl.constexpr,
    VECTOR: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    # A row is a token of a sequence; a unit of it is VECTOR pairs, or VECTOR unrotated channels.
    batch, token, unit, live = _units(num_rows, num_tokens, NUM_PAIRS // VECTOR, BLOCK_ROWS, BLOCK_PAIRS)
    table = (batch * table_batch + token * table_token + unit) * VECTOR + tl.arange(0, VECTOR)[None, :]
    cos = tl.load(cos_ptr + table, mask=live, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=live, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    group = tl.program_id(1)
    x0_groups = tl.cdiv(x0_heads, HEADS)
    if group < x0_groups:
        x_ptr, y_ptr, num_heads = x0_ptr, y0_ptr, x0_heads
        x_batch, x_head, x_token = x0_batch.to(tl.int64), x0_head.to(tl.int64), x0_token.to(tl.int64)
        y_batch, y_head, y_token = y0_batch.to(tl.int64), y0_head.to(tl.int64), y0_token.to(tl.int64)
    else:
        group -= x0_groups
        x_ptr, y_ptr, num_heads = x1_ptr, y1_ptr, x1_heads
        x_batch, x_head, x_token = x1_batch.to(tl.int64), x1_head.to(tl.int64), x1_token.to(tl.int64)
        y_batch, y_head, y_token = y1_batch.to(tl.int64), y1_head.to(tl.int64), y1_token.to(tl.int64)
    first = group * HEADS
    last = tl.minimum(first + HEADS, num_heads)
    x_ptr += first * x_head * VECTOR
    y_ptr += first * y_head * VECTOR
    x = x_ptr + (batch * x_batch + token * x_token) * VECTOR
    y = y_ptr + (batch * y_batch + token * y_token) * VECTOR
    if INTERLEAVED:
        channel = unit * (2 * VECTOR) + tl.arange(0, 2 * VECTOR)[None, :]
        x, y = x + channel, y + channel
        for _ in range(first, last):
            # Loads and stores are contiguous; the pairs are split and joined in registers.
            pairs = tl.load(x, mask=live, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(pairs, (BLOCK_PAIRS, VECTOR, 2)))
            turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK_PAIRS, 2 * VECTOR))
            tl.store(y, turned.to(y_ptr.dtype.element_ty), mask=live)
            x += x_head * VECTOR
            y += y_head * VECTOR
    else:
        channel = unit * VECTOR + tl.arange(0, VECTOR)[None, :]
        x, y = x + channel, y + channel
        for _ in range(first, last):
            a = tl.load(x, mask=live, other=0.0).to(tl.float32)
            b = tl.load(x + NUM_PAIRS, mask=live, other=0.0).to(tl.float32)
            tl.store(y, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=live)
            tl.store(y + NUM_PAIRS, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=live)
            x += x_head * VECTOR
            y += y_head * VECTOR
    if REST:
        batch, token, unit, live = _units(num_rows, num_tokens, REST // VECTOR, BLOCK_ROWS, BLOCK_REST)
        channel = 2 * NUM_PAIRS + unit * VECTOR + tl.arange(0, VECTOR)[None, :]
        x = x_ptr + (batch * x_batch + token * x_token) * VECTOR + channel
        y = y_ptr + (batch * y_batch + token * y_token) * VECTOR + channel
        for _ in range(first, last):
            tl.store(y, tl.load(x, mask=live, other=0.0), mask=live)
            x += x_head * VECTOR
            y += y_head * VECTOR


@tile_function
def _units(  # type: ignore[no-untyped-def]
    num_rows, num_tokens, UNITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return sequence, token and index within the token for each unit of a program, and the mask of valid units."""
    index = tl.arange(0, BLOCK)
    row = tl.program_id(0) * BLOCK_ROWS + index // UNITS
    live = (index < BLOCK_ROWS * UNITS) & (row < num_rows)
    batch, token = (row // num_tokens).to(tl.int64), (row % num_tokens).to(tl.int64)
    return batch[:, None], token[:, None], (index % UNITS)[:, None], live[:, None]


_rotate_heads = define(
    "rotary(Tensor[] heads, Tensor cos, Tensor sin, bool interleaved, bool back, bool[] token_major) -> Tensor[]",
    _launch,
    _empty_results,
)
_op = Op("rotary", _formula, _fused)
