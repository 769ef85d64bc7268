import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fuselayers import ops
from fuselayers.partition import PartitionError, budget, explain, fuse, min_cut, partitioner
from tests.partition.tracing import saved_of, split_of

ROWS, COLUMNS = 64, 96
ACTIVATION = ROWS * COLUMNS * 4  # bytes


def leaves(count: int) -> list[Tensor]:
    return [torch.randn(ROWS, COLUMNS, requires_grad=True) for _ in range(count)]


def tutorial(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a + b + c + d).cos().cos()


def mlp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    hidden = ops.bias_activation_dropout(x @ weight, bias, activation="gelu", p=0.1)
    return ops.bias_dropout_residual(hidden @ weight.T, x, p=0.1)


def mlp_inputs() -> list[Tensor]:
    return [*leaves(1), torch.randn(COLUMNS, COLUMNS, requires_grad=True), torch.randn(COLUMNS, requires_grad=True)]


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("fused", [True, False])
def test_no_mask_is_saved(partition: str, fused: bool) -> None:
    forward, _ = split_of(mlp, *mlp_inputs(), partition=partition, fused=fused)
    saved = saved_of(forward)
    shapes = [(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in saved]
    assert shapes.count(((), torch.int64)) == 2  # a seed for each dropout
    assert not [shape for shape in shapes if shape[1] in (torch.bool, torch.int32)]
    # x, the pre-activation and, op by op, the dropped activation that the second matmul reads
    assert len([shape for shape in shapes if shape[0] == (ROWS, COLUMNS)]) == (
        2 if fused and partition == "min_cut" else 3
    )


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).view(1, ROWS, 3, 4, COLUMNS // 4).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, ROWS, COLUMNS).sin()


def test_never_saves_more_than_torch() -> None:
    cases: list[tuple[Any, list[Tensor]]] = [
        (tutorial, leaves(4)),
        (mlp, mlp_inputs()),
        (attention, [*leaves(1), torch.randn(COLUMNS, 3 * COLUMNS, requires_grad=True)]),
        (lambda a, b: F.layer_norm(a.sin() + b, (COLUMNS,)).square(), leaves(2)),
    ]

    def bytes_of(fn: Any, args: list[Tensor], partition: Any) -> int:
        forward, _ = split_of(fn, *args, partition=partition)
        saved = saved_of(forward)
        unique = {node.meta["val"].untyped_storage()._cdata: node.meta["val"] for node in saved}
        return sum(value.untyped_storage().nbytes() for value in unique.values())

    for fn, args in cases:
        ours, torchs = bytes_of(fn, args, "min_cut"), bytes_of(fn, args, min_cut_rematerialization_partition)
        assert ours <= torchs + 64, f"{getattr(fn, '__name__', fn)}: ours {ours}, torch's {torchs}"


@pytest.mark.parametrize(
    ("returned", "text"),
    [(None, "NoneType"), (lambda module: (module, None), "['GraphModule', 'NoneType']"), (lambda _: (), "[]")],
)
def test_a_users_own_partitioner_that_returns_no_two_graphs(returned: Any, text: str) -> None:
    def mine(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        return returned and returned(joint_module)

    message = (
        f"the partitioner mine must return two GraphModules, forward and backward, got {text}; "
        "to change nothing, return min_cut(joint_module, joint_inputs, **options)"
    )
    calls: list[Any] = [fuse(tutorial, backend=backend, partition=mine) for backend in ("eager", "inductor")]
    for call in (*calls, functools.partial(explain, tutorial, partition=mine)):
        with pytest.raises(PartitionError, match=f"^{re.escape(message)}$"):
            call(*leaves(4))


def test_a_budget_by_name() -> None:
    assert partitioner("budget:0.5") == budget(0.5)
    assert partitioner("budget:1000000") == partitioner("budget:1 MB") == budget(1_000_000)
    assert partitioner("budget:peak:2GB") == budget(peak=2_000_000_000)
    wrong = ("", "half", "0", "-5", "1.5", "nan", "5 TB", "peak:", "peak:0.5", "peak:0", "peak:2 TB")
    for name in (f"budget:{size}" for size in wrong):
        with pytest.raises(
            ValueError,
            match=rf"^'{name}' is not a budget: write budget:0\.5 for a share of what 'default' saves, budget:200MB",
        ):
            partitioner(name)


def test_a_users_own_partitioner_may_wrap_another() -> None:
    @functools.wraps(min_cut)  # this copies the attributes of min_cut too
    def own(joint: Any, inputs: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None) -> Any:
        return min_cut(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    x = torch.randn(4, requires_grad=True)
    fallback = ["eager"]
    fused = fuse(lambda x: x.sin().cos(), backend="eager", partition=own, fallback=fallback)
    fallback.append("no backend")  # the options were read when the function was fused
    torch.testing.assert_close(fused(x), x.sin().cos())
