"""philox -- dropout's mask as a pure function of (seed, row, column).

A mask is never stored: backward, or another machine, recomputes it from eight bytes.

    word(seed, row, group)          = Philox4x32-10 with key = seed (low half, high half)
                                      and counter = (group, row, 0, 0)                    -> 4 x 32 bits
    lane j of a group, j in 0..7    = 16 bits of word j // 2: the low half for even j, the high half for odd j
    keep[row, column]               = lane(column % 8 of group column // 8) >= round(p * 65536)
    scale                           = 65536 / (65536 - round(p * 65536))

The row is the flattened index of all leading dimensions modulo 2^32, the column the index in the last one; both refer
to the whole tensor of a shard (see shards). One Philox call gives eight neighbours, so an element costs an eighth of a
draw. The probability is rounded to a multiple of 1/65536, and the scale follows from the rounded value, so the mean of
`keep * scale` is exactly one. A p below 1/131072 rounds to 0 and drops nothing.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .._torch.dispatch import jit_is_tracing
from .._torch.guards import outside_dynamo
from .._torch.inductor import KernelCall, launch_in_inductor
from ..sources import sources_hash
from .cpu import has_kernels, pointer, run
from .implementations.dispatch import WIDEST
from .implementations.launch import INTERPRETED, kernel, launch, why_no_kernels
from .implementations.triton_language import tile_function, tl
from .rows import column_tile, elementwise_plan
from .shards import Shard, check_shard, first_column, positions, row_indices

__all__ = [
    "check_probability",
    "check_seed",
    "keep_factors",
    "keep_mask",
    "keep_scale",
    "keep_threshold",
    "keep_tile",
    "mask_numbers",
    "philox_4x32",
]

LANES: Final = 8
_SOURCES: Final = sources_hash()[:8]  # see [the sources are an argument]
_LANE_VALUES: Final = 1 << 16
_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)

# See [one kernel for all masks]. Tests that run GPU code on a CPU set it to bool.
_dtype_on_cpu = torch.bfloat16

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return the four 32-bit words that Philox 4x32 computes from `counter` and `key`.

    Args:
        counter: four int64 tensors with values in [0, 2**32), broadcastable against each other.
        key: two int64 tensors with the same range.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(word) for word in philox_4x32((zero,) * 4, (zero,) * 2)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):  # as published
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a * multiplier; both operands are below 2**32."""
    # Note: [no product above 2**63] a * multiplier would need 64 unsigned bits. In int64 it overflows, which is
    # undefined in the C++ that Inductor writes: gcc assumes a non-negative product, drops the mask that clears the
    # sign, and the words are wrong wherever the operand is a scalar. Both multipliers are above 2**31, so the product
    # with (multiplier - 2**32) fits, and a * 2**32 adds a to the high word and nothing to the low.
    product = a * (multiplier - (1 << 32))
    return (product >> 32) + a, product & _WORD


def check_probability(p: float) -> None:
    """Raise unless p is a number with 0 <= p <= 1: TypeError for a tensor, ValueError for other numbers."""
    if isinstance(p, Tensor):
        raise TypeError("dropout probability p must be a number, got a tensor; pass p.item()")
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability p must satisfy 0 <= p <= 1, got {p}")


def check_seed(seed: Tensor, device: torch.device | None = None) -> None:
    """Raise unless `seed` is an int64 tensor of shape [], on `device` if one is given."""
    if not isinstance(seed, Tensor):
        advice = "pass torch.tensor(seed), or None to draw a seed"
        raise TypeError(f"seed must be an int64 tensor of shape [], got {type(seed).__name__}; {advice}")
    if seed.shape != () or seed.dtype != torch.int64:
        raise ValueError(f"seed must be an int64 tensor of shape [], got {seed.dtype} {list(seed.shape)}")
    if device is not None and seed.device != device:
        raise ValueError(f"seed must be on x's device {device}, got {seed.device}; move it with .to(x.device)")


@functools.lru_cache(maxsize=256)
def mask_numbers(p: float) -> tuple[int, float]:
    """Return `keep_threshold` and `keep_scale`. Used by the kernels, at each call."""
    return keep_threshold(p), keep_scale(p)


def keep_scale(p: float) -> float:
    """Return the factor of a kept value: 1 / (1 - p), for the rounded p; 0 for p = 1, which keeps none.

    Raises:
        ValueError: p is outside [0, 1].
        TypeError: p is a tensor.

    >>> keep_scale(0.5)
    2.0
    """
    check_probability(p)
    return 0.0 if p == 1 else _LANE_VALUES / (_LANE_VALUES - keep_threshold(p))


def keep_mask(seed: Tensor, shape: Sequence[int], *, p: float, shard: Shard | None = None) -> Tensor:
    """Return which elements of a tensor of `shape` dropout keeps: a bool tensor on the seed's device.

    Args:
        seed: int64 tensor of shape [], for example from `draw_seed`.
        shape: the shape of the dropout's input; the last dimension counts columns, the others rows.
        p: the probability of dropping an element, 0 <= p <= 1, rounded to a multiple of 1/65536.
        shard: the position of that tensor in the tensor it was cut from; None for a whole tensor.

    Raises:
        ValueError: p is outside [0, 1], the seed is not an int64 tensor of shape [], or the shape does not fit the
            shard.
        TypeError: the seed is not a tensor, p is a tensor, or `shard` is not a Shard.

    >>> keep_mask(torch.tensor(7), (2, 8), p=0.5).int()
    tensor([[0, 1, 1, 1, 1, 0, 1, 0],
            [1, 0, 1, 0, 1, 1, 0, 1]], dtype=torch.int32)
    """
    check_probability(p)
    if seed is None:
        raise TypeError("seed must be an int64 tensor of shape [], got None; draw one with draw_seed")
    check_seed(seed)
    check_shard(shard, shape)
    row_R = row_indices(shard, shape, device=seed.device)
    return keep_factors(seed, shape, row_R, first_column(shard), p=p).to(torch.bool)


def keep_factors(
    seed: Tensor,
    shape: Sequence[int],
    row_R: Tensor | None,
    first_column: int,
    *,
    p: float,
    again: bool = False,
) -> Tensor:
    """Return `keep_mask` as zeros and ones to multiply with: bfloat16 on a CPU, bool elsewhere. Used by dropout.

    Args:
        seed, shape, p: as for `keep_mask`.
        row_R: `row_indices`, or None for a whole tensor.
        first_column: the column of the whole tensor at which this tensor begins.
        again: True in backward; the mask is the same, see [forward and backward do not share].
    """
    columns = shape[-1] if len(shape) else 1
    first_group, skipped = divmod(first_column, LANES)
    groups = (skipped + columns + LANES - 1) // LANES
    threshold = keep_threshold(p)
    num_rows = 1
    for size in shape[:-1]:
        num_rows = num_rows * size
    arguments = seed, row_R, num_rows, first_group, groups, threshold
    # torch.jit.trace would record the sizes of a registered op as constants, and the trace would need this library.
    if jit_is_tracing():
        keep = keep_by_formula(*arguments)
    else:
        keep = torch.ops.fuselayers.keep_factors(*arguments, again=again, sources=_SOURCES)
    kept: Tensor = keep[:, skipped : skipped + columns].view(shape)
    return kept


def keep_by_formula(
    seed: Tensor,
    row_R: Tensor | None,
    num_rows: int,
    first_group: int,
    groups: int,
    threshold: int,
    **_: Any,
) -> Tensor:
    """Run the op `keep_factors` in plain torch, with a bool result. It is the definition of the mask."""
    row_R = positions(0, num_rows, device=seed.device) if row_R is None else row_R
    group_G = positions(first_group, groups, device=seed.device)
    zero = torch.zeros_like(seed)
    counter = ((group_G & _WORD)[None, :], (row_R & _WORD)[:, None], zero, zero)
    words = philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    lanes = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack([lane >= threshold for lane in lanes], -1).flatten(1)


def keep_threshold(p: float) -> int:
    """Return the lane value below which an element is dropped: the rounded p times 65536. Used by the kernels."""
    # p just below one must not round up to "drop everything", whose scale would be infinite.
    return _LANE_VALUES if p == 1 else min(round(p * _LANE_VALUES), _LANE_VALUES - 1)


_library = torch.library.Library("fuselayers", "DEF")  # type: ignore[no-untyped-call]


# Note: [forward and backward do not share] torch's own partitioner merges equal calls. It would then save forward's
# mask for backward, since it does not list our op as recomputable. `again` changes only the call, so that backward
# recomputes the mask from the seed.
#
# Note: [the sources are an argument] Inductor's cache on disk identifies an op by its name and arguments. On a GPU the
# cached code holds the kernel, which would stay in use after this library changed.
_library.define(  # type: ignore[no-untyped-call]
    "keep_factors(Tensor seed, Tensor? row_indices, SymInt num_rows, SymInt first_group, SymInt groups, "
    'int threshold, *, bool again=False, str sources="") -> Tensor'
)


# Note: [one kernel for all masks] Compilers do not trace this op, but fuse the use of the mask with its neighbours.
# On a CPU every kernel with dropout would contain the ten rounds, some 400 operations, and Inductor's int64 code does
# not vectorise without a 64-bit multiply. The mask is bfloat16 there, which Inductor's C++ reads at memory speed with
# AVX-512 and AVX2. With AVX2 a uint8 or a bool takes four times as long (2048x512 float32, two cores of an AMD EPYC,
# times a mask: 0.18 ms as bfloat16, 0.77 as uint8, 0.22 as float32).
# On a GPU Inductor's form of the formula took 47 instructions per element where this op and its use take 25. By the
# model of `benchmarks.lint_kernels` for an H200, bias_dropout_residual of [8192, 4096] in bfloat16 takes 79 us forward
# with the formula, 69 with this op, 48 in its own kernel. Op by op the formula is 191 kernels that move 8.1 GB.
# There Inductor's code launches the kernel itself: a call of the op takes the host some 50 us more.
def _keep_on_cpu(seed: Tensor, row_R: Tensor | None, *numbers: int, **_: Any) -> Tensor:
    if not has_kernels():
        return keep_by_formula(seed, row_R, *numbers).to(torch.bfloat16)
    keep = seed.new_empty((numbers[0], numbers[2] * LANES), dtype=torch.bfloat16)
    row_R = None if row_R is None else row_R.contiguous()
    run("keep_factors", pointer(keep), pointer(seed), pointer(row_R), *numbers)
    return keep


def keep_on_gpu(seed: Tensor, row_R: Tensor | None, *numbers: int, **_: Any) -> Tensor:
    """Run the op `keep_factors` on a GPU, or in Triton's interpreter, as the tests do."""
    num_rows, first_group, groups, threshold = numbers
    if why_no_kernels(seed.device) is not None or LANES * groups > WIDEST:
        return keep_by_formula(seed, row_R, *numbers)
    keep = _empty_keep(seed, row_R, *numbers)
    if threshold == _LANE_VALUES:  # `keep_tile` leaves p = 1 to the scale
        return keep.zero_()
    if keep.numel():
        plan = elementwise_plan(keep.element_size(), *keep.shape, keep.stride(0))
        row_R = None if row_R is None else row_R.contiguous()
        arguments = (keep, seed, row_R, first_group, num_rows, groups, threshold)
        launch(_keep_kernel, plan.grid, arguments, plan.constants[1:])
    return keep


def _keep_for_every_sample(
    info: Any,
    in_dims: tuple[int | None, ...],
    seed: Tensor,
    row_R: Tensor | None,
    *numbers: int,
    **unread: Any,
) -> tuple[Tensor, int]:
    keep = torch.ops.fuselayers.keep_factors
    return torch.stack([keep(sample, row_R, *numbers, **unread) for sample in seed.unbind(in_dims[0] or 0)]), 0


def _empty_keep(
    seed: Tensor, row_R: Tensor | None, num_rows: int, first_group: int, groups: int, threshold: int
) -> Tensor:
    dtype = _dtype_on_cpu if seed.device.type == "cpu" else torch.bool
    return seed.new_empty((num_rows, groups * LANES), dtype=dtype)


def _keep_launch(seed: Any, row_R: Any, *numbers: Any) -> KernelCall | None:
    """Return the launch that fills the mask in Inductor's code for a GPU; None where the op itself has to run."""
    num_rows, first_group, groups, threshold = numbers
    # Inductor makes a 1 a constant, which has no `.to`; of these numbers the kernel uses it for the threshold alone.
    fits = all(isinstance(number, int) for number in numbers) and 1 < threshold < _LANE_VALUES
    if INTERPRETED or seed.get_device().type != "cuda" or row_R is not None or not fits:
        return None
    if not 0 < LANES * groups <= WIDEST or not num_rows:
        return None
    shape = num_rows, LANES * groups
    plan = elementwise_plan(1, *shape, shape[1])
    names = [name for name in _keep_kernel.arg_names if name not in ("keep_ptr", "seed_ptr")]
    values = None, first_group, num_rows, groups, threshold, *plan.constants[1:]
    return KernelCall(_keep_kernel, plan.grid, shape, torch.bool, dict(zip(names, values, strict=True)))


def _fake_keep(seed: Tensor, row_R: Tensor | None, *numbers: int, **_: Any) -> Tensor:
    launch_in_inductor(torch.ops.fuselayers.keep_factors.default, _keep_launch)
    return _empty_keep(seed, row_R, *numbers)


_library.impl("keep_factors", outside_dynamo(_keep_on_cpu), "CPU")  # type: ignore[no-untyped-call]
_library.impl("keep_factors", keep_on_gpu, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("keep_factors", keep_by_formula, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("fuselayers::keep_factors", _fake_keep, lib=_library)
torch.library.register_vmap("fuselayers::keep_factors", _keep_for_every_sample, lib=_library)


@tile_function
def _philox_4x32_tile(seed, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
    # One 64-bit product: `tl.philox` computes a high and a low product, 8 instructions per element more.
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@tile_function
def keep_tile(  # type: ignore[no-untyped-def]
    seed_ptr,
    row_indices_ptr,
    first_group,
    rows,
    num_rows,
    first_column,
    threshold,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Return `keep_mask` for rows [BLOCK_ROWS] and BLOCK_COLUMNS columns from `first_column`, both multiples of 8.

    For p = 1 it keeps everything; the scale of 0 drops it.

    `row_indices_ptr` and `first_group` give the position of rows and columns in the whole tensor of a shard.
    """
    if row_indices_ptr is not None:
        rows = tl.load(row_indices_ptr + rows, mask=rows < num_rows, other=0)
    group = first_group + first_column // 8 + tl.arange(0, BLOCK_COLUMNS // 8)
    zero = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS // 8), tl.uint32)
    seed = tl.load(seed_ptr).to(tl.uint64)
    row_word = zero + rows.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = _philox_4x32_tile(seed, zero + group.to(tl.uint32)[None, :], row_word, zero, zero)
    # A lane is compared in the upper half of its word; the lower half cannot change the result. The threshold of p = 1
    # does not fit there: all elements are kept, and the scale of 0 drops them.
    lowest = threshold.to(tl.uint32) << 16
    even = tl.join(
        tl.join((w0 << 16) >= lowest, (w2 << 16) >= lowest), tl.join((w1 << 16) >= lowest, (w3 << 16) >= lowest)
    )
    odd = tl.join(tl.join(w0 >= lowest, w2 >= lowest), tl.join(w1 >= lowest, w3 >= lowest))
    return tl.reshape(tl.join(even, odd), (BLOCK_ROWS, BLOCK_COLUMNS))


@kernel
def _keep_kernel(  # type: ignore[no-untyped-def]
    keep_ptr,
    seed_ptr,
    row_indices_ptr,
    first_group,
    num_rows,
    num_groups,
    threshold,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = column_tile() * BLOCK_COLUMNS
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    live = (rows < num_rows)[:, None] & (columns < num_groups * 8)[None, :]
    keep = keep_tile(
        seed_ptr, row_indices_ptr, first_group, rows, num_rows, first_column, threshold, BLOCK_ROWS, BLOCK_COLUMNS
    )
    tl.store(keep_ptr + rows.to(tl.int64)[:, None] * (num_groups * 8) + columns[None, :], keep, mask=live)


# The fusion core writes a mask of torch's dropout into a joint graph as one op of a seed and a size.
_library.define("keep_mask(Tensor seed, SymInt[] size, float p) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl(  # type: ignore[no-untyped-call]
    "keep_mask", lambda seed, size, p: keep_mask(seed, size, p=p).contiguous(), "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "fuselayers::keep_mask", lambda seed, size, p: seed.new_empty(size, dtype=torch.bool), lib=_library
)
