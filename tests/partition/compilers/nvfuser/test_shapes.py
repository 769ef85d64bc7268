"""Each op that looks at values in another way, or makes a tensor from numbers, gives what torch gives."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.partition import fuse
from fuselayers.partition.compilers.nvfuser.shapes import SHAPES
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.tracing import CPU, assert_op, script_of

aten = torch.ops.aten

X = torch.linspace(-2, 2, 12).view(3, 4)
_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.view.default: (X, [2, 6]),
    aten._unsafe_view.default: (X, [12]),
    aten.permute.default: (X, [1, 0]),
    aten.transpose.int: (X, -1, 0),
    aten.unsqueeze.default: (X, -1),
    aten.squeeze.default: (X[None, :, None],),
    aten.squeeze.dim: (X[None], 0),
    aten.squeeze.dims: (X[None, :, None], [0, 1, 2]),
    aten.expand.default: (X[:1], [2, 3, -1]),
    aten.slice.Tensor: (X, 1, -3, 9223372036854775807),
    aten.split.Tensor: (X, 3, 1),
    aten.split_with_sizes.default: (X, [1, 3], -1),
    aten.unbind.int: (X, 1),
    aten.select.int: (X, 1, -2),
    aten.cat.default: ([X, X[:1]], 0),
    aten.constant_pad_nd.default: (X, [1, 2, 0, 1], 3.0),
    aten.slice_backward.default: (X, [3, 9], 1, -6, -2, 1),
    aten.full.default: ([3, 2], 1.5),
    aten.full_like.default: (X, 2),
    aten.fill.Scalar: (X, 2),
    aten.scalar_tensor.default: (2.5,),
    aten.arange.default: (5,),
    aten.arange.start: (-2, 5),
    aten.arange.start_step: (3, 7, 1),
    torch.ops.prims.iota.default: (5,),
}
_NAMED: dict[Any, dict[str, Any]] = {
    torch.ops.prims.iota.default: {"start": 3, "step": 2, "dtype": torch.int64, "device": CPU, "requires_grad": False}
}


@pytest.mark.parametrize("target", [target for target in SHAPES if target is not operator.getitem], ids=str)
def test_an_op_gives_what_torch_gives(target: Any, on_the_cpu: StandIn) -> None:
    assert_op(target, _ARGUMENTS.get(target, (X,)), _NAMED.get(target, {}), on_the_cpu)


def test_numbers_up_to_a_float_are_torchs(on_the_cpu: StandIn) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.sin() * torch.arange(4.0, dtype=torch.int64)).cos()

    torch.testing.assert_close(fuse(fn, backend="nvfuser", fallback=())(X), fn(X))
    (made,) = on_the_cpu.defined
    assert "iota" not in made.script()
    assert made.executions == 1


def test_sizes_of_one_come_and_go_without_a_reshape(on_the_cpu: StandIn) -> None:
    script = script_of(on_the_cpu, lambda x: x.sin().view(1, 3, 1, 4).cos().view(3, 4).exp(), X)
    assert [line.partition(" = ")[2].partition("(")[0] for line in script[1:-1]] == [
        "fd.ops.sin",
        "fd.ops.broadcast",
        "fd.ops.cos",
        "fd.ops.squeeze",
        "fd.ops.exp",
    ]
