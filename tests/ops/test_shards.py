from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops import Shard
from fuselayers.partition import fuse
from fuselayers.testing.comparison import as_tuple
from tests.ops import truth
from tests.ops.cases import CASES
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


OPS = (
    *("dropout", "bias_activation_dropout, gelu", "bias_dropout_residual"),
    *("bias_dropout_residual_layer_norm, prenorm", "bias_dropout_residual_rms_norm, post"),
)
every_block = pytest.mark.parametrize(
    ("op", "block"), [(op, block) for op in OPS for block in BLOCKS if "norm" not in op or block in ("batch", "tokens")]
)


def values_and_gradient(op: Callable[..., Any], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    x = inputs[0].detach().requires_grad_()
    outputs = as_tuple(op(x, *inputs[1:], **options))
    return [*outputs, *torch.autograd.grad(outputs, x, [torch.ones_like(y) for y in outputs])]


def check_block(op: str, block: str, *, compile: Callable[..., Any] = lambda call: call, **options: Any) -> None:
    case, cut = CASES[op], BLOCKS[block]
    inputs = tensors(*case.shapes(WHOLE))
    part = [tensor[cut[-tensor.dim() :]] for tensor in inputs]
    shard = Shard(start=tuple(places.start for places in cut), shape=WHOLE)
    got = values_and_gradient(compile(case.op), part, shard=shard, **case.options, **options)
    for of_part, of_whole in zip(got, values_and_gradient(case.op, inputs, **case.options), strict=True):
        torch.testing.assert_close(of_part, of_whole[cut], rtol=1e-5, atol=1e-5)


@every_block
def test_a_shard_has_its_block_of_the_mask(op: str, block: str) -> None:
    check_block(op, block)


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("bias_activation_dropout, gelu", "eager"),
        ("bias_dropout_residual_layer_norm, prenorm", "eager"),
        *(pytest.param(op, "inductor", marks=pytest.mark.slow) for op in (OPS[0], OPS[1], OPS[3])),
    ],
)
def test_inside_a_compiled_function(op: str, backend: str) -> None:
    check_block(op, "tokens", compile=fuse(backend=backend, fallback=(), fullgraph=True))


@pytest.mark.kernels
@every_block
def test_kernels(op: str, block: str) -> None:
    if block == "odd columns":
        with pytest.raises(RuntimeError, match=r"its shard begins at column 3, which is not a multiple of 8; use"):
            check_block(op, block, backend="triton")
    else:
        check_block(op, block, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="Triton's kernels replace those in C++")
def test_kernels_in_cpp_take_any_column() -> None:
    check_block("dropout", "odd columns", backend="cpp")


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
