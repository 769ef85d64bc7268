"""Users' modules that do things no model of transformers does."""

import copy
import functools
import inspect
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.components.swap import swap
from fuselayers.partition import saved_bytes
from tests.components.swap.layers import Feedforward, LlamaRMSNorm, layer


class WithLock(Feedforward):
    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Feedforward()

    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        y: Tensor = self.mlp(x)
        return 2 * y if use_cache else y


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Feedforward()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.mlp(x)


@functools.wraps(F.gelu)
def other_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class WithWrapper(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(other_gelu(self.up(x)))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_a_penalty_on_a_gradient() -> None:
    def gradients(module: nn.Module) -> list[Tensor]:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        parameters = [value for name, value in module.named_parameters() if name != "down.bias"]
        return list(torch.autograd.grad(first.square().sum(), (x, *parameters), allow_unused=True))

    plain = Feedforward()
    swapped = copy.deepcopy(plain)
    assert swap(swapped, level="layers", batch=X).sites
    for got, wanted in zip(gradients(swapped), gradients(plain), strict=True):
        torch.testing.assert_close(got, wanted)


def test_only_models_of_transformers_run_without_a_cache() -> None:
    module = Doubled().train()
    wanted = module(X)
    swap(module, level="layers", batch=X)
    torch.testing.assert_close(module(X), wanted)


def test_buffers_that_forward_assigns_are_put_back() -> None:
    module = Counting()
    swap(module, level="layers", batch=X)
    assert module.calls == 0


def test_a_wrapper_is_not_the_function_that_it_is_named_after() -> None:
    with pytest.warns(UserWarning, match="no rule matches its forward"):
        assert swap(WithWrapper(), level="layers", batch=X).sites == ()


def test_a_class_says_what_is_pickled() -> None:
    module = WithLock()
    swap(module, level="layers", batch=X)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(copied(X), module(X))
        assert not hasattr(copied, "lock")


def test_a_model_on_the_meta_device_is_not_verified() -> None:
    with torch.device("meta"):
        module = Feedforward()
    report = swap(module, level="layers", batch=X.to("meta"), verify="if_possible")
    assert [site.rule for site in report.sites] == ["mlp"]
    assert report.notes == ("not verified: its parameters are on the meta device; give it values",)


@pytest.mark.parametrize("made", [torch.jit.script, lambda layer: torch.export.export(layer, (X,)).module()])
def test_a_compiled_child_is_left_alone(made: Any) -> None:
    module = nn.Sequential(Feedforward(), made(nn.Linear(8, 8)))
    wanted = module(X)
    assert [site.name for site in swap(module, batch=X).sites] == ["0"]
    torch.testing.assert_close(module(X), wanted)


def test_a_norm_is_exported_for_any_number_of_rows() -> None:
    module = layer("llama")
    swap(module, level="layers", batch=X)
    program = torch.export.export(module, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    many = torch.randn(10_000, 8)  # the norm's kernel in C++ takes them in eager mode
    torch.testing.assert_close(program.module()(many), module(many))


class Polynomial(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for exponent in range(3):  # no rule can match a loop
            y = y + x**exponent
        return y


def test_the_source_of_a_class_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """RegNet has 500 modules, and each of 17 rules asks for the form of each: 20 s."""
    read = []
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda function: read.append(function) or source(function))
    swap(nn.Sequential(Feedforward(), *(Polynomial() for _ in range(9))), level="layers", verify=False)
    assert read.count(Polynomial.forward) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "has_kernels"),
    [
        (1 << 14, 8, torch.float32, True),  # too few columns for the kernel
        (1 << 12, 32, torch.float64, True),
        (1 << 12, 32, torch.float32, False),
        (1 << 12, 32, torch.float32, True),
        (7, 32, torch.float32, True),
    ],
)
def test_a_norm_saves_its_input_and_a_number_per_row_where_the_kernel_does_not_run_too(
    rows: int, columns: int, dtype: torch.dtype, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = LlamaRMSNorm(columns).to(dtype)
    swap(module, level="layers", verify=False).require("rms_norm")
    if not has_kernels:
        monkeypatch.setattr("fuselayers.ops.implementations.dispatch.has_kernels", lambda: False)
    x = torch.randn(rows, columns, dtype=dtype, requires_grad=True)
    assert saved_bytes(module, x) <= (rows * columns + rows) * dtype.itemsize
