"""Dropped objects are freed, with their weights and their compiled code. Each kind runs in a new process."""

import json

from tests import processes
from tests.reliability.cases import Cases

# Weights of 1 MB each. `made` is called twice to warm up and `count` times more. Its results must be dead afterwards.
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
    return made.weight, type(made)

def function():
    weight = weights()
    made = fuse(lambda x: (x @ weight).sin(), backend=backend)
    run(made)
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

def model():
    made = fl.build("gpt_nano", ["model.num_layers=1", "model.hidden_dim=512", f"fusion={backend}"])
    made(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    return made.built_from and made, next(made.parameters())

def op():
    x = weights()
    y = fl.ops.dropout(x, 0.1)
    y.sum().backward()
    return x, y

def resident():
    for _ in range(3):  # objects that a pass frees may hold others
        gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

warnings.simplefilter("ignore")
made = globals()[kind]
made(), made()
before = resident()
dropped = [weakref.ref(value) for _ in range(count) for value in made()]
after = resident()
print(json.dumps([len(dropped), sum(reference() is not None for reference in dropped), (after - before) / 1e6]))
"""

_KINDS = (
    "module",
    "function",
    "bound_method",
    "decorated_method",
    "decorator_in_a_class",
    "op",
)


# A case is a kind, a backend and the number of dropped objects.
_FEW = ("function-eager-8",)
_MANY = (
    *(f"{kind}-eager-200" for kind in _KINDS),
    "model-eager-200",
    "module-inductor-10",
    "function-inductor-10",
)


def _limit(kind: str, count: int) -> float:
    """Megabytes that may stay allocated for each dropped object."""
    if kind == "model":
        return 2  # of 14; torch's tracing keeps 0.3 to 1.2, in cycles through C++
    # torch itself keeps some 50 KB for each graph that it compiles, mostly for its logs and guards. Memory that is kept
    # once, whatever the count, weighs more for a few.
    return 0.25 if count == 200 else 1


def test_what_is_dropped_is_freed(cases: Cases) -> None:
    def check(case: str) -> None:
        kind, backend, count = case.split("-")
        ended = processes.run(_PROGRAM, count, kind, backend)
        assert ended.code == 0, ended.errors
        tried, alive, megabytes = json.loads(ended.printed.splitlines()[-1])
        print(f"{kind} on {backend}: {tried} dropped, {tried - alive} freed, {megabytes:.1f} MB more")
        assert tried == 2 * int(count)
        assert alive == 0
        assert megabytes / int(count) < _limit(kind, int(count))

    cases.of_names(check, [*_FEW, *_MANY], few=_FEW)
