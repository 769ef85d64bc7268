import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fuselayers._torch.tracing import REALIZED
from fuselayers.partition import fuse
from fuselayers.partition.joint_graph import JointGraph
from fuselayers.partition.passes import tables_once_pass
from tests.partition.tracing import joint_graph_of, split_of

ATEN = torch.ops.aten
Shape = tuple[int, ...]


def rotated(x: Tensor) -> Tensor:
    """[B, T, D], as attention's rotary positions."""
    angle_TD = torch.outer(torch.arange(x.shape[1], device=x.device).float(), torch.arange(float(x.shape[2])))
    return x * angle_TD.cos() + x.flip(-1) * angle_TD.sin()


def marked(nodes: "list[fx.Node]") -> set[str]:
    return {str(node.target) for node in nodes if REALIZED in node.meta}


def hand_built(
    table: tuple[int, ...], reader: tuple[int, ...], *, device: str = "cpu"
) -> tuple[fx.GraphModule, set[fx.Node]]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(ATEN.full.default, (list(table), 2.0))
    squeezed = graph.call_function(ATEN.unsqueeze.default, (made, 0))
    product = graph.call_function(ATEN.mul.Tensor, (x, squeezed))
    x.meta["val"] = product.meta["val"] = torch.empty(reader, device="meta")
    made.meta["val"] = torch.empty(table, device=device)
    squeezed.meta["val"] = torch.empty((1, *table), device=device)
    graph.output((product,))
    return fx.GraphModule({}, graph), {made}


@pytest.mark.parametrize(
    ("table", "reader", "device", "once"),
    [
        ((4, 8), (2, 4, 8), "cpu", True),
        ((4, 8), (1, 4, 8), "cpu", False),  # made in the loop that reads it
        ((), (4, 8), "cpu", False),  # a number
        ((4, 8), (2, 4, 8), "meta", False),  # any device but the CPU
    ],
)
def test_a_table_is_marked_where_something_larger_reads_it(
    table: Shape, reader: Shape, device: str, once: bool
) -> None:
    module, tables = hand_built(table, reader, device=device)
    got = tables_once_pass(module, tables, readers_of=lambda node: [user for user in node.users for user in user.users])
    assert marked(list(got.graph.nodes)) == ({"aten.full.default"} if once else set())


def test_rotary_tables_are_written_down_in_forward_and_in_backward_and_never_saved() -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    for part in split_of(rotated, x, partition="min_cut"):
        assert marked(list(part.graph.nodes)) == {"aten.cos.default", "aten.sin.default"}
    joint = joint_graph_of(rotated, x)
    assert isinstance(joint, JointGraph)
    assert joint.saved_bytes([node for node in joint.needed if node not in joint.made_from_scalars]) == 0


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_numbers_stay(backend: str) -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    got, expected = fuse(rotated, backend=backend, fallback=())(x), rotated(x)
    torch.testing.assert_close(got, expected)
    dy = torch.randn_like(x)
    torch.testing.assert_close(torch.autograd.grad(got, x, dy), torch.autograd.grad(expected, x, dy))
