"""rotary -- rotary position embedding of queries and keys.

    q          [B, H, T, C]           B batch, H query heads, T tokens, C channels of a head
    k          [B, G, T, C]           G key heads
    cos, sin   [T, R] or [B, T, R]    of position * frequency, for R pairs of channels, 2 R <= C

    forward    (a, b) -> (a cos - b sin, b cos + a sin) for each pair; channels from 2 R on stay as they are
    backward   the same with -sin

Pair i is channels (i, i + R), as in GPT-NeoX and Llama, or (2 i, 2 i + 1) where they are interleaved, as in RoFormer
and GPT-J. GPT-NeoX and Phi turn a part of the channels only.

The rotation is computed in the wider of x's and cos's dtypes, float32 at least, and rounded to x's once. Saved for
backward: cos and sin, and q and k only where cos or sin needs a gradient.

Floor, in elements of q and k together: 2 forward (read, write), 2 backward. The kernel moves that in one launch (two
where their dtypes differ), and reads the tables once for every `_HEADS` heads. It reads q and k where they lie. What it
writes has q's and k's own order of heads and tokens, and no gaps: for heads cut out of a projection [B, T, H * C] that
is the order in which flash attention reads and writes, and a gradient in it becomes one of the projection as a view.

Su et al., "RoFormer", 2021.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .implementations import COMPILED_FROM, define, needs_grad, run
from .implementations.launch import kernel, launch, num_processors
from .implementations.triton_language import tile_function, tl
from .rows import cdiv, next_power_of_2
from .shapes import check_floating

__all__ = ["rotary", "rotary_reference"]

# What a program of four warps turns at a time: 16 elements a thread, in 16 bits two loads of 128 bits.
_TILE: Final = 2048
# For how many heads, one after the other, it keeps the tables of its tokens.
_HEADS: Final = 8


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (q, k), each position rotated by its angles; each keeps its dtype.

    Args:
        q: [B, H, T, C], any float dtype. Any leading shape will do, [T, C] too.
        k: [B, G, T, C], like q but for the number of heads, and the dtype.
        cos: [T, R], usually float32, R from 1 to C / 2; or [B, T, R], with q's leading shape without the heads.
        sin: of cos's shape and dtype.
        interleaved: whether pair i is channels (2 i, 2 i + 1), and not (i, i + R).
        backend: which form serves, see `forms`.

    Raises:
        ValueError: q has fewer than two dimensions, a shape or a device does not fit q, sin's dtype is not cos's, or
            the backend is unknown.
        TypeError: a tensor is not floating.
        RuntimeError: the backend that was asked for cannot take the call.

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> quarter_turn = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotary(q, q, *quarter_turn)[0].flatten()
    tensor([0., 1.])
    """
    _check(q, k, cos, sin)
    turned: tuple[Tensor, Tensor] = run(
        backend, _formula, _fused, (q, k, cos, sin), (interleaved,), compiled_from=COMPILED_FROM
    )
    return turned


def _formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if cos.dim() > 2:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    q_BHTC, k_BGTC = _as_heads(q), _as_heads(k)
    cos, sin = (table if table.dim() < 4 else table.flatten(0, -3) for table in (cos, sin))
    by_token = [x.stride(1) < x.stride(2) for x in (q_BHTC, k_BGTC)]
    turned_q, turned_k = _turned([q_BHTC, k_BGTC], cos, sin, interleaved, False, by_token)
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
        raise ValueError(f"rotary needs two channels per head at least, got q {list(q.shape)}")
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
    """Turn x by tables that broadcast against it."""
    width = 2 * cos.shape[-1]
    first, second = _pairs(x, cos, interleaved)
    turned = first * cos - second * sin, second * cos + first * sin
    y = (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)).to(x.dtype)
    return y if width == x.shape[-1] else torch.cat((y, x[..., width:]), dim=-1)


def _pairs(x: Tensor, cos: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return both channels of each pair that is turned, [..., T, R], in the dtype of the arithmetic."""
    width = 2 * cos.shape[-1]
    x = (x if width == x.shape[-1] else x[..., :width]).to(_wide(x, cos))
    first, second = x.reshape(*x.shape[:-1], cos.shape[-1], 2).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return first, second


def _wide(x: Tensor, cos: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)


def rotary_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """What the op means: each pair of channels times the matrix of its rotation."""
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
        ctx: Any, interleaved: bool, back: bool, by_token: list[bool], cos: Tensor, sin: Tensor, *heads: Tensor
    ) -> tuple[Tensor, ...]:
        tables_learn = any(ctx.needs_input_grad[3:5])
        ctx.save_for_backward(cos, sin, *(heads if tables_learn else ()))
        ctx.options = interleaved, back, by_token
        ctx.set_materialize_grads(False)
        return tuple(_turn_as_they_lie(heads, cos, sin, interleaved, back, by_token))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Any, ...]:
        cos, sin, *heads = ctx.saved_tensors
        interleaved, back, by_token = ctx.options
        _, _, _, wants_cos, wants_sin, *wants = ctx.needs_input_grad
        given = {place: one for place, one in enumerate(dy) if one is not None and wants[place]}
        gradients: list[Tensor | None] = [None] * len(dy)
        if given:
            orders = [by_token[place] for place in given]
            turned_back = _turned(list(given.values()), cos, sin, interleaved, not back, orders)
            for place, gradient in zip(given, turned_back, strict=True):
                gradients[place] = gradient
        dcos = dsin = None
        if wants_cos or wants_sin:
            dcos, dsin = _table_gradients(heads, dy, cos, interleaved, back)
        return None, None, None, dcos if wants_cos else None, dsin if wants_sin else None, *gradients


def _turned(
    heads: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, back: bool, by_token: list[bool]
) -> Sequence[Tensor]:
    """Return q and k turned, or turned back, as one piece; it can be differentiated any number of times.

    A gradient of it is a rotation too, so that this op needs no formula for its second derivative.
    """
    if needs_grad(cos, sin, *heads):
        recorded: Sequence[Tensor] = _Rotary.apply(interleaved, back, by_token, cos, sin, *heads)  # type: ignore[no-untyped-call]
        return recorded
    return _turn_as_they_lie(heads, cos, sin, interleaved, back, by_token)


def _turn_as_they_lie(
    heads: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, back: bool, by_token: list[bool]
) -> list[Tensor]:
    """Turn heads [B, H, T, C]; by token or not says how the results shall lie in memory.

    The op takes and gives them as they lie, [B, T, H, C] where it is by token: nothing has to be copied then to make it
    contiguous for the compiled form.
    """
    lies_by_token = [x.stride(1) < x.stride(2) for x in heads]
    turned = _turn(_swapped(heads, lies_by_token), cos, sin, interleaved, back, lies_by_token, by_token)
    return _swapped(turned, by_token)


def _swapped(heads: Sequence[Tensor], by_token: list[bool]) -> list[Tensor]:
    return [x.transpose(1, 2) if order else x for x, order in zip(heads, by_token, strict=True)]


def _reordered(heads: Sequence[Tensor], lies_by_token: list[bool], by_token: list[bool]) -> list[Tensor]:
    """Heads as they lie, in the order of the results."""
    return _swapped(heads, [lies != order for lies, order in zip(lies_by_token, by_token, strict=True)])


def _table_gradients(
    heads: Sequence[Tensor], dy: Sequence[Tensor | None], cos: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin: sums over the heads, and over the sequences that share a table."""
    shared = (0, 1) if cos.dim() == 2 else (1,)
    dcos = dsin = torch.zeros_like(cos, dtype=_wide(cos, cos))
    for x, one in zip(heads, dy, strict=True):
        if one is not None:
            (a, b), (da, db) = _pairs(x, cos, interleaved), _pairs(one, cos, interleaved)
            dcos = dcos + (a * da + b * db).sum(shared)
            dsin = dsin + (a * db - b * da).sum(shared)
    return dcos.to(cos.dtype), (-dsin if back else dsin).to(cos.dtype)


def _turn_formula(
    heads: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    back: bool,
    lies_by_token: list[bool],
    by_token: list[bool],
) -> list[Tensor]:
    sin = -sin if back else sin
    # A table has no heads; in a tensor by token they stand behind the tokens.
    by_token_tables = cos.unsqueeze(-2), sin.unsqueeze(-2)
    by_head_tables = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return [
        _rotate(x, *(by_token_tables if order else by_head_tables), interleaved)
        for x, order in zip(_reordered(heads, lies_by_token, by_token), by_token, strict=True)
    ]


def _launch(
    heads: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    back: bool,
    lies_by_token: list[bool],
    by_token: list[bool],
) -> list[Tensor]:
    if len({x.dtype for x in heads}) > 1:
        one_by_one = zip(heads, lies_by_token, by_token, strict=True)
        return [_launch([x], cos, sin, interleaved, back, [lies], [order])[0] for x, lies, order in one_by_one]
    results = _like_results(heads, lies_by_token, by_token)
    if not any(y.numel() for y in results):
        return results
    heads, turned = _swapped(heads, lies_by_token), _swapped(results, by_token)
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    # Where there is one tensor only, it stands in the second one's place too, with no heads.
    num_heads = [x.shape[1] for x in heads] + [0]
    x0, x1 = (x if x.stride(3) == 1 else x.contiguous() for x in (heads[0], heads[-1]))
    y0, y1 = turned[0], turned[-1]
    batch, _, tokens, channels = x0.shape
    num_pairs = cos.shape[-1]
    rest = channels - 2 * num_pairs
    strides = [stride for one in (x0, x1, y0, y1) for stride in one.stride()[:3]]
    strides += [cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2)]
    vector = math.gcd(8, num_pairs, rest, *strides)
    block_rows = max(min(_TILE, _TILE // 4 * vector) // channels, 1)
    num_tiles = cdiv(batch * tokens, block_rows)
    together = _HEADS
    # Where tokens are few, as in decoding, rather more programs than fewer reads of the tables.
    while together > 1 and num_tiles * cdiv(sum(num_heads), together) < 4 * num_processors(x0.device):
        together //= 2
    launch(
        _kernel,
        (num_tiles, sum(cdiv(number, together) for number in num_heads)),
        (
            *(x0, x1, y0, y1, cos, sin),
            *(batch * tokens, tokens, *num_heads[:2]),
            *(stride // vector for stride in strides),
        ),
        (
            *(interleaved, back, num_pairs, rest, vector, together, block_rows),
            next_power_of_2(block_rows * (num_pairs // vector)),
            next_power_of_2(block_rows * (rest // vector)),
        ),
    )
    return results


def _like_results(heads: list[Tensor], *rest: Any) -> list[Tensor]:
    ordered = _reordered(heads, *rest[-2:])
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in ordered]


# The widths are constants: a model has one, and its masks and divisions then cost nothing.
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
    # A row is a token of a sequence; a unit of it is VECTOR pairs, or VECTOR channels that stay as they are.
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
            # Loaded and stored as they lie, and taken apart and put together in registers.
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
    """Return the sequence, the token and the place in it of each of a program's units, and which there are."""
    place = tl.arange(0, BLOCK)
    row = tl.program_id(0) * BLOCK_ROWS + place // UNITS
    live = (place < BLOCK_ROWS * UNITS) & (row < num_rows)
    batch, token = (row // num_tokens).to(tl.int64), (row % num_tokens).to(tl.int64)
    return batch[:, None], token[:, None], (place % UNITS)[:, None], live[:, None]


_turn = define(
    "rotary(Tensor[] heads, Tensor cos, Tensor sin, bool interleaved, bool back, bool[] lies_by_token, "
    "bool[] by_token) -> Tensor[]",
    _launch,
    _like_results,
    formula=_turn_formula,
)
