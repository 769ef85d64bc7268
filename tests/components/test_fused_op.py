import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.lint_kernels.record import recorded_launches
from fuselayers.components import (
    KINDS,
    FusedBiasActivationDropout,
    FusedBiasDropoutResidual,
    FusedBiasDropoutResidualLayerNorm,
    FusedMLP,
    GatedMLP,
    get,
    names,
)
from fuselayers.ops.implementations import dispatch
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.ops.implementations.triton_language import HAS_TRITON


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_auto(kind: str) -> None:
    made = [get(kind, name) for name in names(kind) if get(kind, name).__module__.startswith("fuselayers.")]
    taken = [inspect.signature(cls).parameters for cls in made]
    assert {parameters["backend"].default for parameters in taken if "backend" in parameters} <= {"auto"}


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
