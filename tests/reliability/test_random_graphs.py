"""Random functions and random modules through `fuse`, forward and backward, against plain PyTorch in float64."""

import copy
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.partition import PartitionError, budget, fuse
from fuselayers.testing import assert_as_good_as
from tests.generated_functions import SIZES, generated, inputs_of
from tests.reliability.cases import Cases

PARTITIONS = ("min_cut", "default", "budget:0.5")
# The number of seeds for each backend: Inductor compiles for some seconds.
_ALL = {"eager": 120, "inductor": 24}

pytestmark = pytest.mark.parametrize(
    ("partition", "backend"),
    [
        pytest.param(partition, backend, marks=pytest.mark.slow if backend == "inductor" else ())
        for partition in PARTITIONS
        for backend in _ALL
    ],
)


def _check(fn: Callable[..., Any], inputs: Sequence[Tensor], *, backend: str, partition: str) -> None:
    """Raise unless the fused function is as good as the plain one. A budget that a refusal names must be enough."""
    torch.compiler.reset()
    refused = ""
    try:
        _check_partition(fn, inputs, backend=backend, partition=partition)
    except PartitionError as error:
        refused = str(error)
    if refused:
        assert partition.startswith("budget:"), refused
        named = re.search(r"the smallest cut found saves ([\d,]+); give a larger budget", refused)
        assert named is not None, refused
        torch.compiler.reset()
        _check_partition(fn, inputs, backend=backend, partition=budget(int(named[1].replace(",", ""))))


def _check_partition(fn: Callable[..., Any], inputs: Sequence[Tensor], *, backend: str, partition: Any) -> None:
    fused = fuse(fn, backend=backend, partition=partition, fallback=(), fullgraph=True)
    assert_as_good_as(fused, fn, inputs)
    assert fused.served_by == (backend,), "it ran as plain Python"


def test_random_functions(backend: str, partition: str, cases: Cases) -> None:
    def check(random: random.Random) -> None:
        number = random.randrange(2**32)
        torch.manual_seed(number)
        inputs = [tensor.detach() for tensor in inputs_of(*random.choice(SIZES))]
        _check(generated(number), inputs, backend=backend, partition=partition)

    cases.of_seeds(check, few=1, all=_ALL[backend])


class _Joined(nn.Module):
    """A function of the input and of modules."""

    def __init__(self, fn: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.fn, self.parts = fn, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, *self.parts)


def _residual(x: Tensor, inner: nn.Module) -> Tensor:
    return x + inner(x)


def _gated(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    return torch.sigmoid(gate(x)) * up(x)


def _mixed(x: Tensor, over_tokens: nn.Module) -> Tensor:
    return over_tokens(x.transpose(-1, -2)).transpose(-1, -2)


def _attention(x: Tensor, qkv: nn.Module, out: nn.Module, *, heads: int) -> Tensor:
    q, k, v = qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return out((scores @ v).transpose(1, 2).flatten(2))


def _random_module(random: random.Random, *, depth: int, dim: int, tokens: int) -> nn.Module:
    """A tree of modules, each of which maps [B, tokens, dim] to the same shape."""
    inner = lambda: _random_module(random, depth=depth - 1, dim=dim, tokens=tokens)  # noqa: E731
    leaves: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(dim, dim, bias=random.random() < 0.5),
        lambda: nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
        lambda: nn.LayerNorm(dim, eps=0.1),
        lambda: nn.RMSNorm(dim, eps=0.1),
        lambda: nn.Conv1d(tokens, tokens, 3, padding=1),
        lambda: random.choice((nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus, nn.ELU))(),
        lambda: nn.Softmax(-1),
        lambda: nn.Dropout(0.0),
        lambda: _Joined(_mixed, nn.Linear(tokens, tokens)),
        lambda: _Joined(
            partial(_attention, heads=random.choice((1, 2, 4))), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        ),
    ]
    branches: list[Callable[[], nn.Module]] = [
        lambda: _Joined(_residual, inner()),
        lambda: _Joined(_gated, inner(), inner()),
        lambda: nn.Sequential(*(inner() for _ in range(random.randint(2, 3)))),
    ]
    return random.choice(branches if depth else leaves)()


def test_random_modules(backend: str, partition: str, cases: Cases) -> None:
    def check(random: random.Random) -> None:
        torch.manual_seed(random.randrange(2**32))
        dim, tokens = random.choice((4, 8, 12)), random.choice((1, 3, 7))
        module = _random_module(random, depth=random.randint(1, 3), dim=dim, tokens=tokens)
        names = [name for name, _ in module.named_parameters()]
        wide = copy.deepcopy(module).double()

        def call(x: Tensor, *parameters: Tensor) -> Tensor:
            chosen = wide if x.dtype == torch.float64 else module
            result: Tensor = torch.func.functional_call(chosen, dict(zip(names, parameters, strict=True)), (x,))
            return result

        inputs = [
            torch.randn(random.choice((1, 2, 5)), tokens, dim),
            *(parameter.detach() for parameter in module.parameters()),
        ]
        _check(call, inputs, backend=backend, partition=partition)

    cases.of_seeds(check, few=1, all=_ALL[backend])
