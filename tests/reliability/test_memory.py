"""What is dropped is freed: its weights, and what was compiled for it. Each kind in a process of its own."""

import json

import pytest

from tests import processes

# Weights of 1 MB each. `made` is called 200 times (2 of them warm up), and what it returns must be dead after.
_PROGRAM = """
import ctypes, gc, json, sys, warnings, weakref
import torch
from torch import nn
import fuselayers as fl
from fuselayers.partition import fuse

count, kind, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def weights():
    return torch.randn(512, 512, requires_grad=True)

def run(fn):
    fn(torch.ones(2, 512)).sum().backward()

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(weights())

    @fuse(backend=backend)
    def forward(self, x):
        return (x @ self.weight).sin()

def module():
    made = fuse(nn.Linear(512, 512), backend=backend)
    run(made)
    return made.weight, made.fused

def function():
    weight = weights()
    made = fuse(lambda x: (x @ weight).sin(), backend=backend)
    run(made)
    return weight, made

def static():
    weight = weights()
    made = fuse(lambda x, p: (x @ weight) * p, backend=backend, static_argnums=1)
    run(lambda x: made(x, 2.0) + made(x, 3.0))
    return weight, made

def bound_method():
    layer = nn.Linear(512, 512)
    made = fuse(layer.forward, backend=backend)
    run(made)
    return layer.weight, made

def decorated_method():
    layer = Layer()
    run(layer)
    return layer.weight, layer

def decorator_in_a_class():
    class Own(Layer):
        forward = fuse(lambda self, x: (x @ self.weight).sin(), backend=backend)
    layer = Own()
    layer.__dict__["made_of"] = Own
    run(layer)
    return layer.weight, Own

def pinned():
    made = fuse(nn.Linear(512, 512), backend=f"pinned:{backend}")
    run(made)
    return made.weight, made.fused

def model(*overrides):
    made = fl.build("gpt_nano", ["model.num_layers=1", "model.hidden_dim=512", f"fusion={backend}", *overrides])
    made(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    return made.built_from and made, next(made.parameters())

def fused_layers():
    return model("feedforward=fused_mlp", "fusion.scope=layer")

def op():
    x = weights()
    y = fl.ops.dropout(x, 0.1)
    y.sum().backward()
    return x, y

def resident():
    for _ in range(3):  # what one pass frees held the next
        gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

warnings.simplefilter("ignore")
made = globals()[kind]
made(), made()
before = resident()
dropped = [weakref.ref(one) for _ in range(count) for one in made()]
after = resident()
print(json.dumps([len(dropped), sum(one() is not None for one in dropped), (after - before) / 1e6]))
"""

_KINDS = (
    "module",
    "function",
    "static",
    "bound_method",
    "decorated_method",
    "decorator_in_a_class",
    "pinned",
    "fused_layers",
    "op",
)


def _held(count: int, kind: str, backend: str) -> float:
    """Return the megabytes that stay for each that was dropped."""
    ended = processes.run(_PROGRAM, str(count), kind, backend)
    assert ended.code == 0, ended.errors
    tried, alive, megabytes = json.loads(ended.printed.splitlines()[-1])
    print(f"{kind} on {backend}: {tried} dropped, {tried - alive} freed, {megabytes:.1f} MB more")
    assert tried == 2 * count
    assert alive == 0
    return float(megabytes) / count


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", _KINDS)
def test_two_hundred_are_freed(kind: str) -> None:
    # torch itself keeps some 50 KB for each graph that it compiles, mostly for its logs and guards.
    assert _held(200, kind, "eager") < 0.25


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_are_freed() -> None:
    # A model of 14 MB; torch's tracing keeps 0.3 to 1.2 MB, in cycles through C++.
    assert _held(200, "model", "eager") < 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["module", "function"])
def test_compiled_ones_are_freed(kind: str) -> None:
    assert _held(10, kind, "inductor") < 1
