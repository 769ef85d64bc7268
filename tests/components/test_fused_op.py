import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fuselayers import ops
from fuselayers.components import (
    KINDS,
    Choice,
    Decoder,
    EncoderDecoder,
    FusedBiasActivationDropout,
    FusedBiasDropoutResidual,
    FusedBiasDropoutResidualLayerNorm,
    FusedMLP,
    GatedMLP,
    get,
    names,
)
from fuselayers.components.fused_op import op_for
from fuselayers.ops.implementations import dispatch
from fuselayers.ops.implementations.launch import INTERPRETED, recorded_launches
from fuselayers.ops.implementations.triton_language import HAS_TRITON
from fuselayers.partition import FusedFunction


def test_one_fused_function_per_op_backend_and_partition() -> None:
    first = op_for(ops.bias_dropout_residual, backend="eager", partition="min_cut")
    assert isinstance(first, FusedFunction)
    assert op_for(ops.bias_dropout_residual, backend="eager", partition="min_cut") is first
    assert op_for(ops.bias_dropout_residual, backend="eager", partition="default") is not first
    assert op_for(ops.bias_activation_dropout, backend="eager", partition="min_cut") is not first


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_auto(kind: str) -> None:
    made = [get(kind, name) for name in names(kind) if get(kind, name).__module__.startswith("fuselayers.")]
    taken = [inspect.signature(cls).parameters for cls in made]
    assert {parameters["backend"].default for parameters in taken if "backend" in parameters} <= {"auto"}


def test_no_forward_builds_a_fused_function(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FusedMLP(4, backend="eager")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("fuse was called in forward")

    monkeypatch.setattr("fuselayers.components.fused_op.fuse", refuse)
    layer(torch.ones(2, 4)).sum().backward()


def test_auto_is_the_op_itself() -> None:
    for partition in ("min_cut", "budget:0.5"):
        assert op_for(ops.dropout, backend="auto", partition=partition) is ops.dropout


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
        (lambda: FusedMLP(8, dropout=0.1), 3),
        (lambda: GatedMLP(8, dropout=0.1), 4),
    ],
)
def test_on_a_gpu_auto_launches_the_kernels(make: Callable[[], nn.Module], kernels: int) -> None:
    layer = make().to("meta")
    x = torch.empty(3, 8, device="meta", requires_grad=True)
    tensors = (x, x) if "Residual" in type(layer).__name__ else (x,)
    with recorded_launches() as launches:
        layer(*tensors).sum().backward()
    assert len(launches) == kernels


def test_no_token_of_a_text_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = FusedFunction._specialised
    monkeypatch.setattr(FusedFunction, "_specialised", lambda self, *args: calls.append(self) or run(self, *args))
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: FusedBiasActivationDropout(0.1, backend=None),  # type: ignore[arg-type]
        lambda: FusedMLP(4, backend=None),  # type: ignore[arg-type]
        lambda: GatedMLP(4, backend=None),  # type: ignore[arg-type]
    ],
)
def test_none_is_no_backend(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"^backend must be a name, got None; leave it out for 'auto'"):
        make()
