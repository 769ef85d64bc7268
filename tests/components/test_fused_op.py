import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuselayers import ops
from fuselayers.components import (
    Choice,
    Decoder,
    EncoderDecoder,
    FusedBiasActivationDropout,
    FusedBiasDropoutResidual,
    FusedBiasDropoutResidualLayerNorm,
    FusedMLP,
    GatedMLP,
    fused_op,
)
from fuselayers.components.fused_op import op_for
from fuselayers.ops.implementations import dispatch
from fuselayers.ops.implementations.launch import INTERPRETED, recorded_launches
from fuselayers.ops.implementations.triton_language import HAS_TRITON
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


@pytest.fixture
def _meta_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_is_on_gpu", lambda tensor: tensor.is_meta)


needs_kernels = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="nothing is launched as on a GPU")


@needs_kernels
@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize(
    ("make", "kernels"),
    [
        (lambda: FusedBiasActivationDropout(0.1, 8, activation="gelu"), 3),
        (lambda: FusedBiasDropoutResidual(0.1, 8), 3),
        (lambda: FusedBiasDropoutResidualLayerNorm(0.1, 8, bias_shape=8), 3),
        (lambda: FusedMLP(8, dropout=0.1, backend="auto"), 3),
        (lambda: GatedMLP(8, dropout=0.1, backend="auto"), 4),
    ],
)
def test_on_a_gpu_auto_launches_the_kernels(make: Callable[[], nn.Module], kernels: int) -> None:
    layer = make().to("meta")
    x = torch.empty(3, 8, device="meta", requires_grad=True)
    tensors = (x, x) if "Residual" in type(layer).__name__ else (x,)
    with recorded_launches() as launches:
        layer(*tensors).sum().backward()
    assert len(launches) == kernels


@needs_kernels
@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize(
    ("backend", "partition", "dtype"),
    [
        ("inductor", "min_cut", torch.float32),  # was asked for
        ("auto", "budget:0.5", torch.float32),  # kernels know no budget
        ("auto", "min_cut", torch.float64),  # has no kernels
    ],
)
def test_on_a_gpu_the_rest_is_fused(backend: str, partition: str, dtype: torch.dtype) -> None:
    with recorded_launches():
        x = torch.empty(3, 8, dtype=dtype, device="meta")
        assert isinstance(op_for(ops.dropout, x, backend=backend, partition=partition), FusedFunction)


class Subclass(Tensor):
    pass


@needs_kernels
@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("change", [Tensor.double, lambda one: one.as_subclass(Subclass)], ids=["float64", "subclass"])
def test_every_tensor_of_a_call_counts(change: Callable[[Tensor], Tensor], place: int) -> None:
    x, residual, bias = (torch.empty(shape, device="meta") for shape in ((3, 8), (3, 8), (8,)))
    given = [x, residual, bias]
    names = {"backend": "auto", "partition": "min_cut"}
    with recorded_launches():
        assert op_for(ops.bias_dropout_residual, *given, None, **names) is ops.bias_dropout_residual
        given[place] = change(given[place])
        assert isinstance(op_for(ops.bias_dropout_residual, *given, **names), FusedFunction)


@needs_kernels
@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize("place", ["residual", "norm.weight"])
def test_a_layer_names_every_tensor_of_its_call(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FusedBiasDropoutResidualLayerNorm(0.1, 8, bias_shape=8).to("meta")
    x, residual = torch.empty(3, 8, device="meta"), torch.empty(3, 8, device="meta")
    fused: list[object] = []
    monkeypatch.setattr(fused_op, "_fused", lambda op, *_: fused.append(op) or op)
    with recorded_launches():
        layer(x, residual)
        assert not fused
        if place == "residual":
            residual = residual.double()
        else:
            layer.norm.double()
        layer(x, residual)
    assert fused == [ops.bias_dropout_residual_layer_norm]


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
