"""Many threads that call fused functions and ops at once get the results of a single thread."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import fuse
from fuselayers.testing import results
from tests.reliability.cases import Cases

_THREADS = 8
_SIZES = ((3, 5), (7, 5), (9, 4), (1, 8))


_OPS: tuple[Callable[..., Tensor], ...] = (
    lambda a, b, v: ops.residual_layer_norm(a, b, weight=v)[0],
    lambda a, b, v: ops.bias_dropout_residual(a, b, bias=v, p=0.5, seed=torch.tensor(7)),
    lambda a, b, v: ops.gated_activation(a, b) + v,
)


# Functions of a and b, both [R, C], and v, [C].
_PLAIN: tuple[Callable[..., Tensor], ...] = (
    lambda a, b, v: F.gelu(a + v) * b.tanh() + (a * v).sum(-1, keepdim=True).tanh(),
    lambda a, b, v: (a - b.amax(0)).softmax(-1) * v,
    lambda a, b, v: F.layer_norm(a, a.shape[-1:], v, eps=0.1) + b.t().contiguous().cos().t(),
    lambda a, b, v: torch.cat([a, b], 1).tanh()[:, : a.shape[1]] / (1 + v * v),
)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_calls_at_once(backend: str, cases: Cases) -> None:
    def check(random: random.Random) -> None:
        torch.compiler.reset()
        plain = random.sample(_PLAIN, 1 if backend == "inductor" else 3)
        fused = [fuse(fn, backend=backend, fallback=(), dynamic=backend == "inductor") for fn in plain]
        pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
            *zip(plain, fused, strict=True),
            *((op, op) for op in _OPS),
        ]
        start = threading.Barrier(_THREADS, timeout=120)
        torch.manual_seed(random.randrange(2**32))
        work = []
        for _ in range(_THREADS):
            chosen = [random.choice(pairs) for _ in range(4)]
            shapes = [random.choice(_SIZES) for _ in chosen]
            inputs = [[torch.randn(r, c), torch.randn(r, c), torch.randn(c)] for r, c in shapes]
            work.append([(*pair, tensors) for pair, tensors in zip(chosen, inputs, strict=True)])

        def in_a_thread(calls: list[Any]) -> list[dict[str, Tensor]]:
            start.wait()
            return [results(call, tensors) for _, call, tensors in calls]

        with ThreadPoolExecutor(_THREADS) as threads:
            every_result = [*threads.map(in_a_thread, work)]
        for calls, got in zip(work, every_result, strict=True):
            for (alone, _, tensors), values in zip(calls, got, strict=True):
                torch.testing.assert_close(values, results(alone, tensors), rtol=1e-4, atol=1e-5)

    cases.of_seeds(check, few=1, all={"eager": 40, "inductor": 10}[backend])
