import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from fuselayers.cli.bench.cases import OPS, Settings
from fuselayers.cli.bench.peers import liger_function


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces Liger-Kernel, which needs a GPU, and notes its calls."""
    noted: dict[str, Any] = {}

    class Functional(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            def function(*args: Any, **kwargs: Any) -> None:
                noted[name] = [list(one.shape) if isinstance(one, torch.Tensor) else one for one in args], kwargs

            return function

    for name in ("liger_kernel", "liger_kernel.transformers"):
        package = types.ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", Functional("functional"))
    return noted


def test_each_form_takes_the_ops_arguments(calls: dict[str, Any]) -> None:
    x = [2, 3, 64]
    expected = {
        "layer_norm": ("layer_norm", [x, [64], [64], 1e-5], {}),
        "rms_norm": ("rms_norm", [x, [64], 1e-6], {"in_place": False}),
        "residual_rms_norm": ("fused_add_rms_norm", [x, x, [64], 1e-6], {"in_place": False}),
        "gated_activation": ("swiglu", [x, x], {}),
        "rotary": ("rope", [[2, 1, 3, 64]] * 2 + [[3, 32]] * 2, {"rotary_dim": 64}),
        "cross_entropy": ("cross_entropy", [[6, 64], [6]], {}),
        "linear_cross_entropy": ("fused_linear_cross_entropy", [[6, 64], [256, 64], [6]], {}),
    }
    settings = Settings((2, 3, 64), 0.0, "silu", torch.float32, torch.device("cpu"))
    for name, (theirs, args, kwargs) in expected.items():
        case = OPS[name](settings)
        form = liger_function(name, case.options)
        assert form is not None
        form(**case.tensors, **(case.options if name == "gated_activation" else {}))
        assert calls[f"liger_{theirs}"] == (args, kwargs)


def test_ops_that_it_lacks(calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert liger_function("gated_activation", {"activation": "gelu_tanh"}) is not None
    assert liger_function("gated_activation", {"activation": "gelu"}) is None
    assert liger_function("bias_dropout_residual", {}) is None
    monkeypatch.setattr("fuselayers.cli.bench.peers.importlib.util.find_spec", lambda name: None)
    assert liger_function("rms_norm", {}) is None
