import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from fuselayers.cli.bench.cases import OPS, Settings
from fuselayers.cli.bench.peers import liger_form


def settings(activation: str = "silu") -> Settings:
    return Settings((2, 3, 64), dropout=0.0, activation=activation, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def functional(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for Liger-Kernel, which needs a GPU: notes what it is called with."""
    calls: dict[str, Any] = {}
    module = types.ModuleType("liger_kernel.transformers.functional")

    def note(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> str:
            calls[name] = [list(one.shape) if isinstance(one, torch.Tensor) else one for one in args], kwargs
            return name

        return function

    for name in (
        "layer_norm",
        "rms_norm",
        "fused_add_rms_norm",
        "swiglu",
        "geglu",
        "rope",
        "cross_entropy",
        "fused_linear_cross_entropy",
    ):
        setattr(module, f"liger_{name}", note(name))
    for name in ("liger_kernel", "liger_kernel.transformers"):
        package = types.ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_each_form_takes_what_the_op_takes(functional: dict[str, Any]) -> None:
    names = ("layer_norm", "rms_norm", "residual_rms_norm", "rotary", "gated_activation")
    for name in (*names, "cross_entropy", "linear_cross_entropy"):
        case = OPS[name](settings())
        form = liger_form(name, case.options)
        assert form is not None
        form(**case.tensors, **(case.options if name == "gated_activation" else {}))
    x = [2, 3, 64]
    assert functional["layer_norm"] == ([x, [64], [64], 1e-5], {})
    assert functional["rms_norm"] == ([x, [64], 1e-6], {"in_place": False})
    assert functional["fused_add_rms_norm"] == ([x, x, [64], 1e-6], {"in_place": False})
    assert functional["swiglu"] == ([x, x], {})
    assert functional["rope"] == ([[2, 1, 3, 64]] * 2 + [[3, 32]] * 2, {"rotary_dim": 64})
    rows, target = [6, 64], [6]
    assert functional["cross_entropy"] == ([rows, target], {})
    assert functional["fused_linear_cross_entropy"] == ([rows, [256, 64], target], {})


def test_only_what_it_has(functional: dict[str, Any]) -> None:
    assert liger_form("gated_activation", {"activation": "gelu_tanh"}) is not None
    assert liger_form("gated_activation", {"activation": "gelu"}) is None
    assert liger_form("bias_dropout_residual", {}) is None
    with pytest.raises(AttributeError, match="liger_softmax"):  # this version lacks it
        liger_form("softmax", {})


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselayers.cli.bench.peers.importlib.util.find_spec", lambda name: None)
    assert liger_form("rms_norm", {}) is None
