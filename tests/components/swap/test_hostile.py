"""Forwards that must compute the same after `swap`, whatever it finds in them."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuselayers.components.swap import swap, unswap

CALLS = [0]


class Parts(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), act or nn.GELU()
        self.drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(8)
        self.pos, self.one = nn.Parameter(torch.randn(1, 4, 8)), nn.Parameter(torch.full((1,), 2.0))
        self.eps = 1e-6


class Plain(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class AfterReturn(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))
        return x  # type: ignore[unreachable]


class LateRead(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = lambda: x * 2  # noqa: E731
        x = self.down(self.act(self.up(x)))
        return later() + x


class InPlaceOnView(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.up(x)))
        flat = y.view(-1)
        flat += 1
        return y


class InPlaceBetween(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x * 1
        dropped = self.drop(x * 3)
        active = F.relu(residual, inplace=True)
        return (dropped + residual) * active + active


class GlobalCount(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS = [CALLS[0] + 1]
        return self.down(self.act(self.up(x)))


class NamedSlice(Parts):
    def forward(self, x: torch.Tensor, slice: int = 2, tuple: Any = None) -> torch.Tensor:
        first, second = x[:, :slice], x[:, slice:]
        return self.down(self.act(self.up(first))) + second


class Broadcast(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) + self.pos


class Number(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) + 1


class WeightOfOne(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.one * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Branches(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e6:
            return x
        hidden = self.act(self.up(x))
        for _ in range(2):
            hidden = hidden + 1
        try:
            hidden = self.down(hidden)
        except ValueError as error:
            raise RuntimeError from error
        return self.norm(hidden + x)


class OneInputTwice(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(x.repeat(1, 1, 2))
        return self.norm(self.drop(h) + h)


class OldCount(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def bump(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            self.count += 1
        return x * self.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old = self.count
        y = self.bump(x)
        return self.down(self.act(self.up(y))) + old + (self.count + self.bump(x)) - self.count


def forward(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class GlobalForward(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(forward(x))))


class Looking(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        y = self.down(self.act(self.up(h)))
        return y + dict(locals())["h"]


class Positive(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return self.down(self.act(self.up(x)))


class Registered(Parts):
    kinds: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls, **options: Any) -> None:
        Registered.kinds.append(cls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x))) * (1 + len(self.kinds))


def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    y = module(leaf * 1)
    return [
        y.detach(),
        *torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()], allow_unused=True, materialize_grads=True),
    ]


ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "rrelu": nn.RReLU,
    "dropout": lambda: F.dropout,
    "softmax": lambda: nn.Softmax(-1),
    "prelu": nn.PReLU,
    "a function": lambda: torch.tanh,
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        *(Plain, AfterReturn, LateRead, InPlaceOnView, InPlaceBetween, GlobalCount, NamedSlice, Broadcast, Number),
        *(WeightOfOne, Branches, OneInputTwice, OldCount, GlobalForward, Looking, Positive, Registered),
        *(pytest.param(lambda make=make: Plain(make()), id=name) for name, make in ACTIVATIONS.items()),
    ],
)
def test_the_same_values_and_gradients(make: Callable[[], nn.Module], verify: bool) -> None:
    module, x = make(), torch.randn(2, 4, 8)
    CALLS[0] = 0
    first = copy.deepcopy(module)
    expected = run(first, x)
    called = CALLS[0]
    report = swap(module, level="layers", verify=verify, batch=x)
    assert report.skipped == ()
    if isinstance(module, OldCount):
        module.count = 0  # the batch has run through it
    CALLS[0] = 0
    for got, wanted in zip(run(module, x), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert CALLS[0] == called


def test_one_dimension() -> None:
    module, x = Plain(), torch.randn(8)
    expected = run(module, x)
    swap(module, level="layers", verify=False)
    for got, wanted in zip(run(module, x), expected, strict=True):
        torch.testing.assert_close(got, wanted)


class Unpacking(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.unbind(0)
        return self.down(self.act(self.up(first))) + second


def test_unpacking_too_many_values_raises_as_before() -> None:
    module = Unpacking()
    swap(module, level="layers", verify=False)
    assert module(torch.randn(2, 4, 8)).shape == (4, 8)
    with pytest.raises(ValueError, match="too many values to unpack"):
        module(torch.randn(3, 4, 8))


class Helped(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def test_a_method_of_the_instance_is_called() -> None:
    module, x = Helped(), torch.randn(4, 8)
    swap(module, level="layers", verify=False)
    module.inner = lambda x: x * 0  # type: ignore[method-assign]
    assert torch.equal(module(x), x * 0)


def test_a_forward_that_is_assigned_to_its_class_is_read_again() -> None:
    class Changing(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.act(self.up(x)))

    def ten_times(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.up(x)))
        return y * 10

    module, x = Changing(), torch.randn(4, 8)
    swap(module, level="layers", verify=False)
    unswap(module)
    Changing.forward = ten_times  # type: ignore[method-assign]
    expected = module(x)
    swap(module, level="layers", verify=False)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize(("of_x", "of_weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("after", [False, True])
def test_the_dtype_of_a_norm(of_x: torch.dtype, of_weight: torch.dtype, after: bool) -> None:
    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(8, dtype=of_weight)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.float32)
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    class After(Before):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.float32)
            return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)

    module, x = After() if after else Before(), torch.randn(3, 8).to(of_x)
    expected = module(x)
    report = swap(module, level="layers", verify=False)
    assert [site.rules for site in report.sites] == [("rms_norm",)]
    torch.testing.assert_close(module(x), expected, atol=0.02, rtol=0.02)


def test_each_dropout_follows_its_own_mode() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.act = nn.Linear(8, 64), nn.Linear(64, 8), nn.GELU()
            self.inner, self.outer, self.norm = nn.Dropout(0.5), nn.Dropout(0.5), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y = self.outer(self.down(self.inner(self.act(self.up(x)))))
            return y, self.norm(self.outer(self.down(self.up(x))) + x), self.outer(x) + x

    module, x = Dropping(), torch.rand(64, 8) + 1
    swap(module, level="layers", verify=False)
    module.train()
    module.inner.eval()
    module.outer.eval()
    assert all(torch.equal(one, other) for one, other in zip(module(x), module(x), strict=True))
    module.eval()
    module.outer.train()
    assert not any(torch.equal(one, other) for one, other in zip(module(x), module(x), strict=True))
    assert 0.3 < (module(x)[0] == 0).float().mean() < 0.7


def test_hooks_of_all_modules_are_called() -> None:
    module, x = Plain(), torch.randn(4, 8)
    swap(module, level="layers", verify=False)
    plain = module(x)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        swapped = module(x)
        unswap(module)
        assert torch.equal(module(x), swapped)
        assert not torch.equal(swapped, plain)
    finally:
        handle.remove()


def test_whole_numbers_and_classes_that_pickle_themselves() -> None:
    module = nn.Sequential(nn.Dropout(0.5)).eval()
    swap(module, level="layers", verify=False)
    assert torch.equal(module(torch.arange(3)), torch.arange(3))

    class Rebuilt(Plain):
        def __reduce__(self) -> Any:
            return Rebuilt, ()

    assert swap(nn.Sequential(Rebuilt()), where="0", level="layers", verify=False).sites == ()


def test_a_module_with_a_lock_stays_as_it_is_and_buffers_keep_their_values() -> None:
    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1  # type: ignore[operator, has-type]
            return self.down(self.act(self.up(x)))

    module = Counting()
    swap(module, level="layers", batch=torch.randn(2, 8))
    assert module.calls == 0


def test_a_value_is_freed_where_it_was_before() -> None:
    class Freeing(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(self.act(self.up(x)))
            alive = weakref.ref(y)
            for _ in range(1):
                y = y.detach() + 1
            gc.collect()
            assert alive() is None
            return y

    module = Freeing()
    swap(module, level="layers", verify=False)
    with torch.no_grad():
        module(torch.randn(2, 8))
