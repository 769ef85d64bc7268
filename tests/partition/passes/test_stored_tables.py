import torch
from torch import Tensor

from fuselayers._torch.inductor import REALIZED
from tests.partition.tracing import joint_graph_of, split_of


def rotated(x: Tensor) -> Tensor:
    """x [B, T, D] with rotary positions."""
    angle_TD = torch.outer(torch.arange(x.shape[1], device=x.device).float(), torch.arange(float(x.shape[2])))
    return x * angle_TD.cos() + x.flip(-1) * angle_TD.sin()


def test_rotary_tables_are_stored_in_forward_and_in_backward_and_never_saved() -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    for part in split_of(rotated, x, partition="min_cut"):
        marked = {str(node.target) for node in part.graph.nodes if REALIZED in node.meta}
        assert marked == {"aten.cos.default", "aten.sin.default"}
    joint = joint_graph_of(rotated, x)
    assert joint.saved_bytes([node for node in joint.needed if node not in joint.made_from_scalars]) == 0
