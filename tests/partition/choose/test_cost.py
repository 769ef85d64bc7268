import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from fuselayers.partition import CostModel, Machine, machine_of, min_cut
from fuselayers.partition.choose.cost import flops_of
from tests.partition.tracing import gpt, joint_graph_of

# In bytes moved, an elementwise op costs 0.1 per element, a launch 1,000, and a FLOP of a matmul 0.1 or 0.05.
MACHINE = Machine(
    "round", bandwidth=1e9, flop_rate=1e10, low_precision_flop_rate=2e10, vector_flop_rate=4e9, kernel_seconds=1e-6
)
COST = CostModel(MACHINE)
ROWS, COLUMNS = 16, 32


def chain(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sin().exp() @ weight


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("price", [-0.5, math.nan, math.inf])
def test_memory_is_worth_something(price: float) -> None:
    with pytest.raises(
        ValueError, match=rf"^memory_price must be a finite number of bytes .*, 0 or more, got {price}$"
    ):
        CostModel(MACHINE, memory_price=price)


def test_recomputing_a_value_tagged_prefer_save_costs_a_hundred_times_more() -> None:
    joint = joint_graph_of(chain, leaf(ROWS, COLUMNS), leaf(COLUMNS, COLUMNS))
    for target in (torch.ops.aten.sin.default, torch.ops.aten.mm.default):
        node = next(node for node in joint.nodes if node.target == target)
        plain = COST.recomputing(node, joint)
        node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
        reluctant = COST.recomputing(node, joint)
        assert COST.total(reluctant) == pytest.approx(100 * COST.total(plain))
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        assert COST.recomputing(node, joint) == plain


class TestFlops:
    @pytest.mark.parametrize(
        ("fn", "shapes", "expected"),
        [
            (torch.mm, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
            (torch.bmm, [(4, 3, 5), (4, 5, 7)], 4 * 2 * 3 * 5 * 7),
            (F.linear, [(3, 5), (7, 5), (7,)], 2 * 3 * 5 * 7),
            (F.conv2d, [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * 2 * 5 * 6 * 6 * 3 * 3 * 3),
            # Attention is two matmuls: the scores and the weighted sum. Grouped heads count as all heads.
            (F.scaled_dot_product_attention, [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)], 2 * 2 * 2 * 3 * 5 * 6 * 8),
            (
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                [(2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)],
                2 * 2 * 2 * 6 * 5 * 5 * 8,
            ),
            (lambda x: x.sin().softmax(-1).sum() + F.layer_norm(x, (7,)).sum(), [(3, 7)], 0),
        ],
        ids=["mm", "bmm", "linear", "convolution", "attention", "grouped heads", "elementwise"],
    )
    def test_are_those_of_the_formula(self, fn: Callable[..., Tensor], shapes: Any, expected: int) -> None:
        joint = joint_graph_of(fn, *(leaf(*shape) for shape in shapes))
        assert sum(flops_of(node) for node in joint.nodes if node in joint.forward) == expected

    def test_a_model(self) -> None:
        layers, batch, tokens, dim, vocabulary = 2, 2, 32, 64, 128
        joint = gpt().joint()
        rows = batch * tokens
        linear = 2 * rows * dim * (12 * layers * dim + vocabulary)
        attention = layers * 2 * (2 * batch * tokens * tokens * dim)
        assert sum(flops_of(node) for node in joint.nodes if node in joint.forward) == linear + attention


def test_op_by_op_only_free_ops_are_recomputed() -> None:
    """A separate kernel costs more than the memory, however cheap the op."""
    for fn, args in (
        (chain, (leaf(ROWS, COLUMNS), leaf(COLUMNS, COLUMNS))),
        (lambda x: x.sin().cos().exp().tanh(), (leaf(ROWS, COLUMNS),)),
        (lambda x, y: F.layer_norm(x.sin() + y, (COLUMNS,)).square(), (leaf(ROWS, COLUMNS), leaf(ROWS, COLUMNS))),
    ):
        joint = joint_graph_of(fn, *args)
        cost = CostModel(machine_of("cpu"), fused=False)
        saved = min_cut.saved_values(joint, fused=False)
        for node in joint.recomputed(saved):
            assert cost.total(cost.recomputing(node, joint)) == 0, node
