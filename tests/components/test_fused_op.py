import threading

import pytest
import torch

from fuselayers import ops
from fuselayers.components import Choice, Decoder, EncoderDecoder, FusedMLP
from fuselayers.components.fused_op import op_for
from fuselayers.partition import FusedFunction, disable_fusion


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


def test_within_disable_fusion_the_op_is_called_directly() -> None:
    seen = []

    def look() -> object:
        return op_for(ops.dropout, backend="eager", partition="min_cut")

    def fail() -> None:
        with disable_fusion(), disable_fusion():
            raise KeyError

    with disable_fusion():
        assert look() is ops.dropout
        with pytest.raises(KeyError):
            fail()
        assert look() is ops.dropout
        other = threading.Thread(target=lambda: seen.append(look()))
        other.start()
        other.join()
    assert seen == [look()]
    assert isinstance(look(), FusedFunction)


def test_no_token_of_a_text_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    call = FusedFunction.__call__
    monkeypatch.setattr(
        FusedFunction, "__call__", lambda self, *args, **kwargs: calls.append(self) or call(self, *args, **kwargs)
    )
    sizes = {"vocab_size": 9, "hidden_dim": 8, "num_layers": 1, "context_length": 4, "init_std": 0.5}
    parts = {"attention": Choice("multi_head", {"num_heads": 2}), "feedforward": "fused_mlp"}
    tokens_BT = torch.tensor([[1, 2]])
    for kind in (Decoder, EncoderDecoder):
        plain, fused = kind(**sizes, **parts), kind(**sizes, **parts, backend="eager")
        fused.load_state_dict(plain.state_dict())
        expected = plain.generate(tokens_BT, 5, temperature=0)
        assert torch.equal(fused.generate(tokens_BT, 5, temperature=0), expected)
        assert not calls
        fused(tokens_BT, tokens_BT)
        assert calls
        calls.clear()


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
