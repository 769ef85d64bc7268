import ast
import functools
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuselayers.components.swap import swap
from fuselayers.components.swap.match import matches, replaced
from fuselayers.components.swap.source import parse_run, read
from fuselayers.components.swap.steps import Run, Unreadable
from fuselayers.components.swap.write import write

SCALE = 3.0


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return 2 * function(self, *args, **kwargs)

    return wrapper


class Straight(nn.Module):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor, scale: float = 2.0, **more: Any) -> torch.Tensor:
        """A docstring."""
        first, second = x.chunk(2, dim=-1)
        x = first * scale + SCALE
        residual = x
        x = F.relu(-x[..., :2] if more else second[..., :2])
        if rest:
            x = x + rest[0]
            residual, x = x, residual
        for one in rest:
            x = x - one
        return x + residual[..., :2]


class Decorated(Straight):
    @doubled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half(x) + 1

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def test_a_forward_is_read_and_written_again() -> None:
    again = write(read(Straight), {}, title="again")
    x, module = torch.randn(3, 4), Straight()
    for args, kwargs in (((), {}), ((torch.ones(3, 2),), {}), ((), {"scale": 3.0}), ((), {"flag": True})):
        assert torch.equal(again(module, x, *args, **kwargs), module(x, *args, **kwargs))
    assert inspect.signature(again) == inspect.signature(Straight.forward)
    assert again.__doc__ == "A docstring."


def test_decorators_and_methods_are_followed() -> None:
    again, x = write(read(Decorated), {}, title="again"), torch.randn(3)
    assert torch.equal(again(Decorated(), x), 2 * (x / 2 + 1))
    (run,) = read(Decorated).body
    assert isinstance(run, Run)
    assert [step.kind for step in run.steps] == [("binary", "Div"), ("binary", "Add")]


def test_a_value_lives_no_longer_than_before() -> None:
    write(read(Decorated), {}, title="lifetimes")
    import linecache

    lines = [line.strip() for line in linecache.getlines("<lifetimes>")]
    assert lines.index("del _fuselayers_0") == lines.index("_fuselayers_1 = _fuselayers_0 + 1") + 1


def with_closure() -> type:
    factor = 2

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return Closed


@pytest.mark.parametrize(
    ("cls", "why"),
    [(with_closure(), "a variable of a function around it"), (nn.Linear.__mro__[-1], "no plain function")],
)
def test_what_is_not_read(cls: type, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read(cls)


def run_of(text: str) -> Run:
    return parse_run(text, {"torch": torch, "F": F})


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("y = self.down(F.relu(self.up(x)))", True),
        ("h = self.up(x)\nh = F.relu(h)\ny = self.down(h)", True),
        ("h = self.up(x)\nz = F.relu(h)\ny = self.down(z) + h", False),  # h is used outside
        ("y = self.down(F.gelu(self.up(x)))", False),
        ("y = self.down(F.relu(self.up(x), True))", False),
        ("h = self.up(x)\nx = x.add_(1)\ny = self.down(F.relu(h))", False),  # x may have changed
    ],
)
def test_matches(source: str, found: bool) -> None:
    pattern = run_of("y = down(F.relu(up(x)))")
    slots = dict.fromkeys(("up", "down"), lambda ref: True)
    run = run_of(source)
    # What is assigned and not the result is not read later.
    run = Run(run.steps, {"y": run.bound["y"]})
    assert bool(list(matches(pattern, run, results=("y",), slots=slots))) == found


def test_either_order_of_a_sum_and_a_product() -> None:
    pattern = run_of("y = a * scale + b")
    for source in ("y = p * self.s + q", "y = q + p * self.s", "y = q + self.s * p"):
        (match,) = matches(pattern, run_of(source), results=("y",), slots={"scale": lambda ref: ref.path == "s"})
        assert ast.unparse(ast.Constant(str(match.bound["a"]))) == repr("Local(name='p')")


def test_a_call_in_place_of_a_match() -> None:
    pattern = run_of("s = a + b\nn = norm(s)")
    run = run_of("s = p + q\nn = self.norm(s)\ny = n * s")
    (match,) = matches(
        pattern, Run(run.steps, {"y": run.bound["y"]}), results=("n", "s"), slots={"norm": lambda ref: True}
    )
    new = replaced(Run(run.steps, {"y": run.bound["y"]}), match, "fused", ("a", "b"), ("norm",))
    assert [step.kind[0] for step in new.steps] == ["call", "result", "result", "binary"]


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

    def forward(self, x: torch.Tensor, base: float = -2.0) -> torch.Tensor:
        even = base if SCALE else -4.0
        sign = (-1) ** torch.arange(8) + (-2.0) ** 2 + even**2
        return self.down(self.act(self.up(x))) * sign


def test_the_power_of_a_negative_number() -> None:
    module, x = Alternating().eval(), torch.randn(3, 8)
    expected = module(x)
    report = swap(module, level="layers", verify=False)
    assert [site.rules for site in report.sites] == [("mlp",)]
    torch.testing.assert_close(module(x), expected)
