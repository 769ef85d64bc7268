"""Rules that stand in the steps of several modules."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuselayers.components.swap import Rule, swap, unswap
from fuselayers.components.swap.shipped import RULES
from fuselayers.components.swap.slots import is_flag, is_layer_norm, is_linear, is_number, is_parameter

SCALE = [1.0]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.p = 0.0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = norm or RmsNorm(), mlp or Gated(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Summing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp(x)
        x = x + h
        return self.norm(x) + x


class Number(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(1 + self.mlp(x))


class NormReadTwice(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        return n + self.mlp(n)


class Returning(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Counting(Gated):
    calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return self.down(F.silu(self.gate(x)) * self.up(x))


class WithData(Gated):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * SCALE[0]


class WithDefault(Gated):
    def forward(self, x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * scale


class Called(Gated):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        result: torch.Tensor = super().__call__(x)
        return 2 * result


class Functional(Gated):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return F.dropout(self.down(F.dropout(F.gelu(self.up(x)), self.p, self.training)), p=0.0)


def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    y = module(leaf * 1)
    wanted = [leaf, *module.parameters()]
    grads = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True, materialize_grads=True)
    return [y.detach(), *grads]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


RMS_NORM = """
f = x.to(torch.float32)
y = weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def gated(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> torch.Tensor:
    result: torch.Tensor = down(F.silu(gate(x)) * up(x))
    return result


_RMS_NORM = {"weight": is_parameter, "eps": is_number}
_GATED = {"gate": is_linear, "up": is_linear, "down": is_linear}
# Rules that stand in a block, its norm and its MLP.
SPANNING = (
    Rule(
        "rms_norm_gated_mlp",
        (f"{RMS_NORM}\nx = y\ny = down(F.silu(gate(x)) * up(x))",),
        inputs=("x",),
        results=("y",),
        slots={**_RMS_NORM, **_GATED},
        replacement=lambda x, weight, eps, **mlp: gated(rms_norm(x, weight, eps), **mlp),
    ),
    Rule(
        "layer_norm_gated_mlp",
        ("x = norm(x)\ny = down(F.silu(gate(x)) * up(x))",),
        inputs=("x",),
        results=("y",),
        slots={"norm": is_layer_norm, **_GATED},
        replacement=lambda x, norm, **mlp: gated(norm(x), **mlp),
    ),
    Rule(
        "rms_norm_mlp",
        (f"{RMS_NORM}\ny = down(F.dropout(F.gelu(up(y)), p, drops))",),
        inputs=("x",),
        results=("y",),
        slots={**_RMS_NORM, "up": is_linear, "down": is_linear, "p": is_number, "drops": is_flag},
        replacement=lambda x, weight, eps, up, down, p, drops: down(
            F.dropout(F.gelu(up(rms_norm(x, weight, eps))), p, drops)
        ),
    ),
)

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "rms norm": (Block, ("rms_norm_gated_mlp", "dropout_residual")),
    "layer norm": (lambda: Block(norm=nn.LayerNorm(8)), ("layer_norm_gated_mlp", "dropout_residual")),
    "no bias": (lambda: Block(norm=nn.LayerNorm(8, bias=False)), ("layer_norm_gated_mlp", "dropout_residual")),
    "no weight": (lambda: Block(norm=nn.LayerNorm(8, elementwise_affine=False)), ("dropout_residual",)),
    "summing": (Summing, ("residual_rms_norm",)),
    "number": (lambda: Number(norm=nn.LayerNorm(8)), ("residual_norm",)),
    "norm read twice": (NormReadTwice, ()),
    "returning": (lambda: Block(norm=Returning()), ("dropout_residual",)),
    "counting": (lambda: Block(mlp=Counting()), ("dropout_residual",)),
    "data": (lambda: Block(mlp=WithData()), ("dropout_residual",)),
    "default": (lambda: Block(mlp=WithDefault()), ("rms_norm_gated_mlp", "dropout_residual")),
    "called": (lambda: Block(mlp=Called()), ("dropout_residual",)),
    "functional": (lambda: Block(mlp=Functional()), ("rms_norm_mlp", "dropout_residual")),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_values_and_gradients(name: str) -> None:
    make, rules = CASES[name]
    module, x = make().eval(), torch.randn(2, 3, 8)
    expected = run(copy.deepcopy(module), x)
    report = swap(module, rules=(*SPANNING, *RULES), level="layers", batch=x)
    assert report.skipped == ()
    assert next((site.rules for site in report.sites if site.name == ""), ()) == rules
    assert_same(run(module, x), expected)
    types = [type(one) for one in module.modules()]
    copied, unpickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert [type(one) for one in copied.modules()] == types
    # Rules of one's own are not pickled.
    own = any(rule.name in rules for rule in SPANNING)
    assert [type(one) for one in unpickled.modules()] == ([Block, *types[1:]] if own else types)
    for other in (copied, unpickled):
        assert_same(run(other, x), expected)
    assert unswap(module) == len(report.sites)


class Doubled(Gated):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return 2 * super().forward(x)


def _hook(module: Block) -> None:
    module.norm.register_forward_hook(lambda *args: args[-1] * 2)


def _backward_hook(module: Block) -> None:
    module.mlp.register_full_backward_hook(lambda module, grads, outs: tuple(3 * one for one in grads))


def _forward_of_an_object(module: Block) -> None:
    module.mlp.forward = lambda x: x * 5  # type: ignore[method-assign]


def _other_class(module: Block) -> None:
    module.mlp = Doubled()


def _frozen(module: Block) -> None:
    module.norm.requires_grad_(False)
    module.mlp.gate.requires_grad_(False)  # type: ignore[union-attr, operator]


def _parametrized(module: Block) -> None:
    nn.utils.parametrizations.weight_norm(module.mlp.gate)  # type: ignore[arg-type]


def _adapted(module: Block) -> None:
    module.mlp.down = nn.Sequential(module.mlp.down, nn.Tanh())  # type: ignore[arg-type]


def _other_eps(module: Block) -> None:
    module.norm.eps = 0.5  # type: ignore[assignment]


def _shared(module: Block) -> None:
    module.mlp.gate = module.mlp.up


CHANGES = (_hook, _backward_hook, _forward_of_an_object, _other_class, _frozen, _parametrized, _adapted)


@pytest.mark.parametrize("change", [*CHANGES, _other_eps, _shared])
def test_changed_after_the_swap(change: Callable[[Block], None]) -> None:
    module, x = Block().eval(), torch.randn(2, 3, 8)
    swap(module, level="layers", verify=False)
    change(module)
    if change is _frozen:
        leaf = x.clone().requires_grad_()
        swapped = torch.autograd.grad(module(leaf).sum(), [leaf, module.mlp.up.weight])  # type: ignore[union-attr, list-item]
        unswap(module)
        wanted = torch.autograd.grad(module(leaf).sum(), [leaf, module.mlp.up.weight])  # type: ignore[union-attr, list-item]
        assert_same(list(swapped), list(wanted))
        return
    results = run(module, x)
    unswap(module)
    assert_same(results, run(module, x))


def test_a_class_whose_forward_is_assigned_later() -> None:
    class Changing(Gated):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    module, x = Block(mlp=Changing()).eval(), torch.randn(3, 8)
    swap(module, "", level="layers", verify=False)
    Changing.forward = lambda self, x: x * 7  # type: ignore[method-assign, assignment, misc]
    assert torch.equal(module(x), x + module.norm(x) * 7)


def test_dropout_in_training_follows_each_layer() -> None:
    module, x = Block(mlp=Functional()), torch.randn(64, 8)
    swap(module, level="layers", verify=False)
    module.train()
    module.drop.p = 0.0
    assert torch.equal(module(x), module(x))
    module.mlp.p = 0.5  # type: ignore[assignment]
    assert not torch.equal(module(x), module(x))
    module.mlp.eval()
    assert torch.equal(module(x), module(x))
    module.mlp.train()
    for reentrant in (False, True):
        torch.manual_seed(3)
        wanted = run(module, x)
        again = copy.deepcopy(module)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y: Any = checkpoint(again, leaf * 1, use_reentrant=reentrant)
        torch.testing.assert_close(y.detach(), wanted[0])
        (dx,) = torch.autograd.grad(y.square().sum(), [leaf]) if not reentrant else (None,)
        if dx is not None:
            torch.testing.assert_close(dx, wanted[1])
        else:
            y.square().sum().backward()
            torch.testing.assert_close(leaf.grad, wanted[1])


@pytest.mark.parametrize("norm", [RmsNorm, lambda: nn.LayerNorm(8)])
def test_under_autocast(norm: Callable[[], nn.Module]) -> None:
    module, x = Block(norm=norm()).eval(), torch.randn(4, 8)
    results = []
    for swapped in (False, True):
        if swapped:
            swap(module, level="layers", verify=False)
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        module.zero_grad()
        y.float().square().sum().backward()
        results.append([y.detach(), *(one.grad for one in module.parameters())])
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, atol=5e-2, rtol=5e-2)


def test_a_norm_has_a_second_derivative() -> None:
    norm, x = RmsNorm(), torch.randn(3, 8, requires_grad=True)
    results = []
    for swapped in (False, True):
        if swapped:
            swap(norm, level="layers", verify=False)
        (dx,) = torch.autograd.grad(norm(x).square().sum(), [x], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), [x, norm.weight]))
    assert_same(list(results[1]), list(results[0]))


def test_a_compiler_traces_it_in_one_graph() -> None:
    module, x = Block().eval(), torch.randn(2, 8)
    swap(module, level="layers", verify=False)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


class Tripled(Gated):
    def _call_impl(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = 3 * super()._call_impl(x)
        return result


def test_a_child_that_is_called_in_its_own_way_is_called() -> None:
    module, x = Block(mlp=Tripled()).eval(), torch.randn(4, 8)
    expected = module(x)
    swap(module, level="layers", verify=False)
    torch.testing.assert_close(module(x), expected)
    module = Block().eval()
    swap(module, level="layers", verify=False)
    call = module.mlp._call_impl
    module.mlp._call_impl = lambda *args: 3 * call(*args)  # type: ignore[method-assign]
    expected = x + 3 * Gated.forward(module.mlp, module.norm(x))  # type: ignore[arg-type]
    torch.testing.assert_close(module(x), expected)


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.sin(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Sine()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.inner(x))


def test_a_replacement_gets_the_mode_of_its_own_module() -> None:
    def rule(name: str, pattern: str, replacement: Callable[..., torch.Tensor]) -> Rule:
        return Rule(name, (f"y = {pattern}",), inputs=("x",), results=("y",), replacement=replacement)

    def sine(x: torch.Tensor, *, training: bool) -> torch.Tensor:
        return torch.full_like(x, 1.0 if training else 0.0)

    rules = [rule("exp_of_negative", "torch.exp(-x)", lambda x: torch.exp(-x)), rule("sine", "torch.sin(x)", sine)]
    module = Outer().train()
    module.inner.eval()
    swap(module, rules=rules, level="layers", verify=False)
    assert module(torch.zeros(1)).item() == 1.0
    module.inner.train()
    assert module(torch.zeros(1)).item() == pytest.approx(math.exp(-1.0))


def test_a_gate_that_is_broadcast_stays_so() -> None:
    mlp = Gated()
    mlp.gate = nn.Linear(8, 1)
    module, x = Block(mlp=mlp).eval(), torch.randn(4, 8)
    expected = module(x)
    swap(module, level="layers", verify=False)
    torch.testing.assert_close(module(x), expected)
