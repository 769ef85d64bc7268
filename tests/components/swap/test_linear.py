"""Linear layers are swapped where `ops.linear` is faster, and nowhere else."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers.pytorch_utils import Conv1D

from fuselayers import swap, unswap
from fuselayers._torch.onednn import has_onednn

linear_module: Any = sys.modules["fuselayers.ops.linear"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 192), nn.LayerNorm(192), Conv1D(128, 192), nn.LayerNorm(128), nn.Linear(128, 3))


@pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")
def test_large_layers_take_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = linear_module.onednn_product
    monkeypatch.setattr(linear_module, "onednn_product", lambda *factors: calls.append(factors) or run(*factors))
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: True)
    plain, swapped, x = model(), model(), torch.randn(8, 64, 128)
    report = swap(swapped, level="layers", batch=x)
    assert [(site.name, site.rule) for site in report.sites] == [("0", "linear"), ("2", "linear")]
    calls.clear()
    got, wanted = (
        [fn(x), *torch.autograd.grad(fn(x).square().sum(), list(fn.parameters()))] for fn in (swapped, plain)
    )
    assert len(calls) == 2 + 2 + 3  # two forwards, and backward without the gradient of x
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    unswap(swapped)
    assert type(swapped[0]) is nn.Linear


@pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")
def test_swapped_feedforwards_take_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = linear_module.onednn_product
    monkeypatch.setattr(linear_module, "onednn_product", lambda *factors: calls.append(factors) or run(*factors))
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: True)
    model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128))
    assert "mlp" in {site.rule for site in swap(model, level="layers", batch=torch.randn(512, 128)).sites}
    calls.clear()
    model(torch.randn(512, 128, requires_grad=True)).sum().backward()
    assert len(calls) == 6


def test_an_argument_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: True)
    plain: Any = model()
    swapped: Any = model()
    assert len(swap(swapped, level="layers", verify=False).sites) == 2
    torch.testing.assert_close(swapped[0](input=torch.ones(3, 128)), plain[0](torch.ones(3, 128)))
    torch.testing.assert_close(swapped[2](x=torch.ones(3, 192)), plain[2](torch.ones(3, 192)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        swapped[0](y=torch.ones(3, 128))


def test_a_parametrization_is_computed_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computation of a spectral norm takes a step of its power iteration."""
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: True)
    results = []
    for is_swapped in (False, True):
        layers = model()
        if is_swapped:
            assert len(swap(layers, level="layers", verify=False).sites) == 2
        spectral_norm(layers[0])  # type: ignore[index]
        results.append((layers(torch.ones(3, 128)), dict(layers.named_buffers())))
    torch.testing.assert_close(*results)


def test_a_machine_that_prefers_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: False)
    with pytest.warns(UserWarning, match="swap changed nothing"):
        assert swap(model(), level="layers", batch=torch.randn(8, 64, 128)).sites == ()
