"""Forwards that branch on plain attributes of the module, and that call functions of their own file."""

import copy
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuselayers.components.swap import SwapReport, fallbacks, swap, unswap
from fuselayers.partition import FallbackWarning


def drop_and_add(x: torch.Tensor, residual: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    out = F.dropout(x, p=p, training=training)
    return residual + out


class Layer(nn.Module):
    """An MLP behind or before a norm, or behind none."""

    def __init__(self, norm_first: bool = True, style: str | None = "gelu", scale: float | None = None) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU()
        self.norm_first, self.style, self.scale, self.p = norm_first, style, scale, 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        if self.norm_first and self.style is not None:
            x = self.norm(x)
        x = self.up(x)
        x = self.act(x) if self.style == "gelu" else torch.sin(x)
        if self.scale is not None and self.scale > 1:
            x = x * self.scale
        x = drop_and_add(self.down(x), residual, self.p, self.training)
        if self.norm_first:
            return x
        return self.norm(x)


class OfHalves(nn.Module):
    """As timm has it."""

    def __init__(self, gate_last: bool, dim: int = -1) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act, self.gate_last, self.chunk_dim = (
            *(nn.Linear(8, 16), nn.Linear(8, 8), nn.Sigmoid()),
            *(gate_last, dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        x1, x2 = x.chunk(2, dim=self.chunk_dim)
        x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
        return self.fc2(x)


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def results(module: nn.Module) -> list[torch.Tensor]:
    """The result and the gradients."""
    x = X.clone().requires_grad_()
    y = module(x)
    parameters = [one for one in module.parameters() if one.requires_grad]
    found = torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)
    return [y.detach(), *(torch.zeros(()) if one is None else one for one in found)]


def swapped(module: nn.Module, **more: Any) -> SwapReport:
    return swap(module, level="layers", **{"batch": X, **more})


def assert_as_its_original(module: nn.Module) -> None:
    plain = copy.deepcopy(module)
    unswap(plain)
    for got, wanted in zip(results(module), results(plain), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (Layer, ("mlp", "dropout_residual")),
        (lambda: Layer(norm_first=False), ("mlp", "dropout_residual_norm")),
        (lambda: Layer(style=None), ("dropout_residual",)),
        (lambda: Layer(scale=1.0), ("mlp", "dropout_residual")),
        (lambda: Layer(scale=2.0), ("dropout_residual",)),
        (lambda: OfHalves(True), ("packed_gated_mlp",)),
        (lambda: OfHalves(False), ("packed_gated_mlp",)),
        (lambda: OfHalves(True, dim=1), None),  # it may be another one
    ],
)
def test_the_branch_that_the_values_take_is_read(make: Callable[[], nn.Module], rules: tuple[str, ...] | None) -> None:
    module = make().eval()
    report = swapped(module)
    assert report.skipped == ()
    assert [site.rules for site in report.sites if site.name == ""] == ([] if rules is None else [rules])
    assert_as_its_original(module)


def test_two_modules_of_a_class_may_take_two_branches() -> None:
    module = nn.Sequential(Layer(), Layer(norm_first=False), Layer()).eval()
    swapped(module)
    first, second, third = (type(one) for one in module)
    assert first is third is not second
    assert_as_its_original(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert [type(one) for one in other] == [first, second, third]


def test_a_copy_in_another_process_finds_the_same() -> None:
    module = Layer().eval()
    swapped(module)
    kind: Any = type(module)
    loader, arguments, _ = module.__reduce_ex__(2)
    made = pickle.loads(pickle.dumps(loader))(*arguments)  # it makes the class again
    assert type(made) is kind


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("norm_first", False, "self.norm_first is False now"),
        ("style", "sine", "self.style == 'gelu' is False now"),
        ("scale", 2.0, "self.scale is not None and self.scale > 1 is True now"),
    ],
)
def test_another_value_takes_the_original_forward(name: str, value: Any, reason: str) -> None:
    module = Layer().eval()
    swapped(module)
    setattr(module, name, value)
    with pytest.warns(FallbackWarning, match=re.escape(reason)):
        module(X)
    assert_as_its_original(module)
    assert [one.reason for one in fallbacks(module)] == [reason]


def test_a_value_of_no_weight_is_not_looked_at() -> None:
    class Logging(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(self.act(self.up(x)))
            return (y * 1 if self.norm_first else y + 0) if self.style else y * 2

    module = Logging().eval()
    (site,) = swapped(module, where="").sites
    assert site.rules == ("mlp",)
    module.norm_first, module.style = False, "sine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_its_original(module)


class Alternating(Layer):
    def turn(self) -> None:
        self.norm_first = not self.norm_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn()
        if self.norm_first:
            x = self.norm(x)
        return self.down(self.act(self.up(x)))


class Flag(nn.Module):
    """Has a flag that it turns in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.on = not self.on
        return x


class OfAnother(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.flag = Flag()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flag(x)
        if self.flag.on:
            x = self.norm(x)
        return self.down(self.act(self.up(x)))


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    @property
    def even(self) -> bool:
        return len(self.calls) % 2 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        if self.even:
            x = self.norm(x)
        return self.down(self.act(self.up(x)))


class ByName(Alternating):
    def turn(self) -> None:
        setattr(self, "norm_" + "first", not self.norm_first)


@pytest.mark.parametrize("kind", [Alternating, OfAnother, Counting, ByName])
def test_an_attribute_that_a_call_changes_is_not_fixed(kind: type[Layer]) -> None:
    module = kind().eval()
    plain = copy.deepcopy(module)
    swapped(module, verify=False)
    for _ in range(3):
        for got, wanted in zip(results(module), results(plain), strict=True):
            torch.testing.assert_close(got, wanted)


def test_the_mode_is_not_fixed() -> None:
    class OfMode(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                x = 2 * x
            return self.down(self.act(self.up(x)))

    module = OfMode().eval()
    assert [site.rules for site in swapped(module).sites] == [("mlp",)]
    for mode in (True, False):
        assert_as_its_original(module.train(mode))
    assert fallbacks(module) == ()


def test_a_value_that_takes_the_same_branch_stays_fused() -> None:
    module = Layer(scale=0.5).eval()
    swapped(module)
    module.scale, module.norm_first = 0.7, 1  # type: ignore[assignment]
    assert_as_its_original(module)
    assert fallbacks(module) == ()


def test_a_function_that_is_replaced_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Layer().eval()
    swapped(module)
    monkeypatch.setattr(sys.modules[__name__], "drop_and_add", lambda x, residual, p, training: x - residual)
    with pytest.warns(FallbackWarning, match="drop_and_add is another function"):
        module(X)
    assert_as_its_original(module)


def scaled(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], scale: float) -> torch.Tensor:
    y = function(x)
    return y * scale


class Changing(Layer):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1):  # its steps do not stand in place of a call
            self.p = 0.0
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.down(self.act(self.up(x))), self.change, self.p)


def test_what_a_function_is_given_is_read_before_the_call() -> None:
    module = Changing()
    assert [site.rules for site in swapped(module, verify=False).sites] == [("mlp",)]
    module.p = 0.5
    assert module(X).abs().min() > 0
    assert module(X).abs().max() == 0


def test_a_compiled_module_has_no_graph_break() -> None:
    module = Layer().eval()
    expected = module(X)
    swapped(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), expected)
    module.norm_first = False
    with pytest.warns(FallbackWarning):
        expected = module(X)
    torch.testing.assert_close(compiled(X), expected)
