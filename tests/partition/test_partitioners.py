from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fuselayers import ops
from fuselayers.partition import default as default_partitioner
from fuselayers.partition import fuse, min_cut, saved_bytes
from tests.partition.tracing import split_of

ROWS, COLUMNS = 64, 96
ONE = ROWS * COLUMNS * 4  # bytes of one activation


def leaves(count: int) -> list[Tensor]:
    return [torch.randn(ROWS, COLUMNS, requires_grad=True) for _ in range(count)]


def tutorial(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a + b + c + d).cos().cos()


def called(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_the_tutorial_saves_one_tensor() -> None:
    forward, backward = split_of(tutorial, *leaves(4), partition="min_cut")
    saved = next(iter(reversed(forward.graph.nodes))).args[0][1:]
    assert [node.name for node in saved] == ["add_2"]
    assert "aten.cos.default" in called(backward)  # computed again from the saved sum


def test_the_tutorial_by_default_saves_what_eager_saves() -> None:
    inputs = leaves(4)
    assert saved_bytes(tutorial, *inputs) == 2 * ONE
    assert saved_bytes(fuse(tutorial, backend="eager", partition="default"), *inputs) == 2 * ONE
    assert saved_bytes(fuse(tutorial, backend="inductor", partition="min_cut", fallback=()), *inputs) == ONE


def test_run_op_by_op_nothing_is_computed_twice_for_its_own_sake() -> None:
    _, backward = split_of(tutorial, *leaves(4), partition="min_cut", fused=False)
    assert "aten.cos.default" not in called(backward)


def mlp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    hidden = ops.bias_activation_dropout(x @ weight, bias, activation="gelu", p=0.1)
    return ops.bias_dropout_residual(hidden @ weight.T, x, p=0.1)


def mlp_inputs() -> list[Tensor]:
    return [*leaves(1), torch.randn(COLUMNS, COLUMNS, requires_grad=True), torch.randn(COLUMNS, requires_grad=True)]


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("fused", [True, False])
def test_no_mask_is_saved(partition: str, fused: bool) -> None:
    forward, _ = split_of(mlp, *mlp_inputs(), partition=partition, fused=fused)
    saved = next(iter(reversed(forward.graph.nodes))).args[0][1:]
    shapes = [(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in saved]
    assert shapes.count(((), torch.int64)) == 2  # a seed for each dropout
    assert not [shape for shape in shapes if shape[1] in (torch.bool, torch.int32)]
    # x, the pre-activation and, op by op, the dropped activation that the second matmul read
    assert len([shape for shape in shapes if shape[0] == (ROWS, COLUMNS)]) == (
        2 if fused and partition == "min_cut" else 3
    )


def test_no_matmul_and_no_draw_runs_twice() -> None:
    forward, backward = split_of(mlp, *mlp_inputs(), partition="min_cut")
    assert called(forward).count("aten.mm.default") == 2
    assert called(backward).count("aten.mm.default") == 4
    assert "fuselayers.draw_seed.default" not in called(backward)
    assert called(forward).count("fuselayers.draw_seed.default") == 2


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).view(1, ROWS, 3, 4, COLUMNS // 4).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, ROWS, COLUMNS).sin()


def test_never_saves_more_than_torch() -> None:
    cases: list[tuple[Any, list[Tensor]]] = [
        (tutorial, leaves(4)),
        (mlp, mlp_inputs()),
        (attention, [*leaves(1), torch.randn(COLUMNS, 3 * COLUMNS, requires_grad=True)]),
        (lambda a, b: F.layer_norm(a.sin() + b, (COLUMNS,)).square(), leaves(2)),
        (lambda a, b: F.silu(a) * b, leaves(2)),
    ]

    def bytes_of(fn: Any, args: list[Tensor], partition: Any) -> int:
        forward, _ = split_of(fn, *args, partition=partition)
        saved = next(iter(reversed(forward.graph.nodes))).args[0][1:]
        unique = {node.meta["val"].untyped_storage()._cdata: node.meta["val"] for node in saved}
        return sum(value.untyped_storage().nbytes() for value in unique.values())

    for fn, args in cases:
        ours, torchs = bytes_of(fn, args, "min_cut"), bytes_of(fn, args, min_cut_rematerialization_partition)
        assert ours <= torchs + 64, f"{getattr(fn, '__name__', fn)}: ours {ours}, torch's {torchs}"


def test_a_users_own_partitioner() -> None:
    seen = []

    def mine(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        seen.append(options["num_fwd_outputs"])
        return min_cut(joint_module, joint_inputs, **options)

    inputs = leaves(4)
    for backend in ("eager", "inductor"):
        fused = fuse(tutorial, backend=backend, partition=mine, fallback=())
        torch.testing.assert_close(fused(*inputs), tutorial(*inputs))
    assert seen == [1, 1]


@pytest.mark.parametrize("partition", [default_partitioner, min_cut])
def test_without_a_gradient_through_an_input(partition: Any) -> None:
    x, y = torch.randn(4, requires_grad=True), torch.randn(4)
    fused = fuse(lambda x, y: (x * y.sin(), y.cos()), backend="eager", partition=partition)
    out, constant = fused(x, y)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], y.sin())
    torch.testing.assert_close(constant, y.cos())


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_sizes_are_saved_as_numbers(partition: str) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x.sum() / x.shape[0]

    fused = fuse(scaled, backend="eager", partition=partition, dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4, requires_grad=True)
        torch.testing.assert_close(torch.autograd.grad(fused(x), x)[0], torch.full((rows, 4), 1 / rows))
    assert saved_bytes(fused, torch.randn(8, 4, requires_grad=True)) == 0
