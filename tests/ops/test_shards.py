from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops import Shard
from fuselayers.partition import fuse
from tests.ops import truth
from tests.ops.contract import INTERPRETED, seed_of, tensors

WHOLE = (4, 6, 32)
# Cut in each dimension alone, in several, and at a column that is no multiple of the mask's eight lanes.
BLOCKS = {
    "batch": (slice(1, 3), slice(0, 6), slice(0, 32)),
    "tokens": (slice(0, 4), slice(2, 5), slice(0, 32)),
    "columns": (slice(0, 4), slice(0, 6), slice(16, 32)),
    "all": (slice(1, 4), slice(3, 5), slice(8, 21)),
    "odd columns": (slice(0, 4), slice(0, 6), slice(3, 20)),
    "nothing": (slice(2, 2), slice(0, 6), slice(0, 32)),
}


def shard_of(block: tuple[slice, ...]) -> Shard:
    return Shard(start=tuple(cut.start for cut in block), shape=WHOLE)


def bias_dropout_residual_layer_norm(x: Tensor, **options: Any) -> Tensor:
    weight = torch.ones(x.shape[-1], device=x.device)
    y = ops.bias_dropout_residual_layer_norm(x, x, weight=weight, style="prenorm", **options)
    return torch.cat(y)


def bias_dropout_residual_rms_norm(x: Tensor, **options: Any) -> Tensor:
    return ops.bias_dropout_residual_rms_norm(x, x, weight=torch.ones(x.shape[-1], device=x.device), **options)


def bias_dropout_residual(x: Tensor, **options: Any) -> Tensor:
    return ops.bias_dropout_residual(x, x, **options)


WITHIN_ROWS = (bias_dropout_residual_layer_norm, bias_dropout_residual_rms_norm)
OPS = (partial(ops.dropout, p=0.5), partial(ops.bias_activation_dropout, activation="gelu", p=0.5))
DROPPING: dict[str, Callable[..., Tensor]] = {
    "dropout": OPS[0],
    "bias_activation_dropout": OPS[1],
    "bias_dropout_residual": partial(bias_dropout_residual, p=0.5),
    **{op.__name__: partial(op, p=0.5) for op in WITHIN_ROWS},
}
CASES = [(op, block) for op in DROPPING for block in BLOCKS if "norm" not in op or block in ("batch", "tokens")]


def values_and_gradient(op: Callable[..., Tensor], x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = op(x, seed=seed_of(), **options)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]


def check_block(
    op: Callable[..., Tensor],
    block: tuple[slice, ...],
    *,
    of_whole: Callable[..., Tensor] | None = None,
    **options: Any,
) -> None:
    (x,) = tensors(WHOLE)
    whole = values_and_gradient(of_whole or op, x)
    part = values_and_gradient(op, x[block], shard=shard_of(block), **options)
    for got, expected in zip(part, whole, strict=True):
        halves = expected.shape[0] // WHOLE[0]
        expected = torch.cat([half[block] for half in expected.chunk(halves)])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "block"), CASES)
def test_a_shard_has_its_block_of_the_mask(op: str, block: str) -> None:
    check_block(DROPPING[op], BLOCKS[block])


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("bias_activation_dropout", "eager"),
        ("bias_dropout_residual_layer_norm", "eager"),
        pytest.param("dropout", "inductor", marks=pytest.mark.slow),
        pytest.param("bias_activation_dropout", "inductor", marks=pytest.mark.slow),
        pytest.param("bias_dropout_residual_layer_norm", "inductor", marks=pytest.mark.slow),
    ],
)
def test_inside_a_compiled_function(op: str, backend: str) -> None:
    fused = fuse(DROPPING[op], backend=backend, fallback=(), fullgraph=True)
    check_block(fused, BLOCKS["tokens"], of_whole=DROPPING[op])


@pytest.mark.kernels
@pytest.mark.parametrize(("op", "block"), CASES)
def test_kernels(op: str, block: str) -> None:
    if block == "odd columns":
        with pytest.raises(RuntimeError, match=r"its shard begins at column 3, which is not a multiple of 8; use"):
            check_block(DROPPING[op], BLOCKS[block], backend="triton")
    else:
        check_block(DROPPING[op], BLOCKS[block], backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="Triton's kernels replace those in C++")
def test_kernels_in_cpp_take_any_column() -> None:
    check_block(DROPPING["dropout"], BLOCKS["odd columns"], backend="cpp")


def test_the_mask_is_its_definition() -> None:
    mask = ops.keep_mask(seed_of(), (2, 9), p=0.5, shard=Shard(start=(2**32 - 1, 5), shape=(2**33, 40)))
    rows = [truth.kept(int(seed_of()), number, 14, 32768)[5:] for number in (2**32 - 1, 0)]
    assert mask.tolist() == rows


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^a shard needs a start and a size for each dimension, got \[0\] and \[\]$"):
        Shard((0,), ())
    with pytest.raises(ValueError, match=r"^a shard must start inside the whole \[4, 8\], got \[5, 0\]$"):
        Shard((5, 0), (4, 8))
    with pytest.raises(
        TypeError, match=r"^a shard's start and shape must be whole numbers, got \[0.5, 0\] and \[4, 8\]$"
    ):
        Shard((0.5, 0), (4, 8))  # type: ignore[arg-type]
    assert Shard([0, 1], [4, 8]) == Shard((0, 1), (4, 8))  # type: ignore[arg-type]
    assert hash(Shard([0, 1], [4, 8])) == hash(Shard((0, 1), (4, 8)))  # type: ignore[arg-type]
    x = torch.ones(2, 8)
    with pytest.raises(TypeError, match=r"^shard must be a fuselayers.ops.Shard or None, got tuple$"):
        ops.dropout(x, 0.5, shard=((0, 0), (4, 8)))  # type: ignore[arg-type]
    message = r"^a tensor \[2, 8\] that starts at \[3, 0\] does not fit in the whole \[4, 8\]$"
    with pytest.raises(ValueError, match=message):
        ops.bias_dropout_residual(x, x, p=0.5, shard=Shard((3, 0), (4, 8)))
    with pytest.raises(ValueError, match=r"^a tensor \[2, 8\] that starts at \[0\] does not fit in the whole \[9\]$"):
        ops.bias_activation_dropout(x, p=0.5, shard=Shard((0,), (9,)))
    with pytest.raises(ValueError, match=r"^a norm needs whole rows of 16, got a shard with 8 columns$"):
        ops.bias_dropout_residual_rms_norm(x, x, weight=torch.ones(8), p=0.5, shard=Shard((0, 8), (2, 16)))
