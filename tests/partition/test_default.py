import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition.default import saved_by_default
from tests.partition.tracing import joint_graph_of


def names(fn: object, *args: Tensor) -> list[str]:
    return [str(node.target) for node in saved_by_default(joint_graph_of(fn, *args))]


def test_saves_what_backward_reads() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert names(lambda x: x.sin().cos(), x) == ["primals_1", "aten.sin.default"]


def test_views_stand_for_what_they_look_at() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert names(lambda x: x.exp().view(8, 4).t().cos(), x) == ["aten.exp.default"]


def test_a_seed_stands_for_its_mask() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    assert names(lambda x: ops.dropout(x.sin(), 0.5), x) == ["primals_1", "fuselayers.draw_seed.default"]


def test_nothing_needed_nothing_saved() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert names(lambda x: x * 2 + 1, x) == []
