import pytest
import torch

from fuselayers import ops
from fuselayers.components import FusedMLP
from fuselayers.components.fused_op import op_for
from fuselayers.partition import FusedFunction


def test_one_fused_function_per_op_backend_and_partition() -> None:
    first = op_for(ops.bias_dropout_residual, backend="eager", partition="min_cut")
    assert isinstance(first, FusedFunction)
    assert op_for(ops.bias_dropout_residual, backend="eager", partition="min_cut") is first
    assert op_for(ops.bias_dropout_residual, backend="eager", partition="default") is not first
    assert op_for(ops.bias_activation_dropout, backend="eager", partition="min_cut") is not first


def test_no_forward_builds_a_fused_function(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FusedMLP(4, backend="eager")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("fuse was called in forward")

    monkeypatch.setattr("fuselayers.components.fused_op.fuse", refuse)
    layer(torch.ones(2, 4)).sum().backward()


def test_without_a_backend_the_op_is_called_directly() -> None:
    assert op_for(ops.dropout, backend=None, partition="min_cut") is ops.dropout


@pytest.mark.parametrize(
    ("backend", "partition", "text"),
    [
        ("inducter", "min_cut", "no backend 'inducter'; did you mean 'inductor'"),
        ("eager", "mincut", "no partition.* 'mincut'; did you mean 'min_cut'"),
    ],
)
def test_an_unknown_name_fails_when_the_layer_is_built(backend: str, partition: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FusedMLP(4, backend=backend, partition=partition)
