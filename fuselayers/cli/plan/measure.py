"""measure -- this CPU's rates at a model's sizes, and the time of its training step.

All of it is the CPU time of one thread, the shortest of several runs: what other processes do then hardly counts.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ... import ops
from ..._torch.dispatch import FakeTensorMode, TorchDispatchMode
from ...configs import Config, build, compose
from ...configs.create import device_memory
from ...partition.machine import processor_name
from .hardware import Hardware
from .op_work import ATTENTION, fake_step, op_work
from .trace import EAGER, count, depth_of, meta_model
from .work import Rates, Work

_ROUNDS: Final = 7
_SECONDS: Final = 0.02  # of a round, at least
# A model in which kernels do next to nothing, so that starting them takes the time.
_SMALLEST: Final = ("model.hidden_dim=8", "model.num_layers=2", "model.context_length=8", "attention.num_heads=2")


def shortest(run: Callable[[], object], *, rounds: int = _ROUNDS) -> float:
    """Return the seconds of a call, in the quickest of some rounds of calls."""
    run()
    started = time.thread_time()
    run()
    calls = max(math.ceil(_SECONDS / max(time.thread_time() - started, 1e-7)), 1)
    best = math.inf
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(calls):
            run()
        best = min(best, (time.thread_time() - started) / calls)
    return best


def example_of(model: Any, batch: int) -> tuple[Tensor, ...]:
    """Return inputs of a model, fused or not, with values that differ."""
    plain = getattr(model, "module", model)
    return tuple(
        torch.randn(one.shape) if one.is_floating_point() else torch.randint(0, 200, one.shape)
        for one in plain.example_inputs(batch, device="meta")
    )


def is_fused(config: Config) -> bool:
    """Whether a model goes through `fuse`; if not, it runs op by op."""
    return config.fusion.scope != "none"


def training_step(config: Config, batch: int) -> Callable[[], object]:
    """Return a training step of a model on this CPU: forward, backward, clipping, AdamW."""
    model = build(config, ["fusion=inductor"] if is_fused(config) else [])
    inputs = example_of(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(*inputs).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects matrix products and attentions with the layouts of their operands, and how often each runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[Any, ...]] = Counter()
        self.work: dict[tuple[Any, ...], Work] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        work = op_work(op, args, kwargs or {}, result)
        if work.flops:
            key = (
                op,
                tree_map_only(Tensor, _layout, args),
                tuple(tree_map_only(Tensor, _layout, kwargs or {}).items()),
            )
            self.calls[key] += 1
            self.work[key] = work
        return result


def _layout(tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return ("tensor", tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _made(layout: Any) -> Any:
    if isinstance(layout, tuple) and layout[:1] == ("tensor",):
        _, shape, stride, dtype = layout
        return torch.empty_strided(shape, stride, dtype=dtype).uniform_(0.1, 1.0)
    return layout


def this_machine(config: Config, batch: int) -> Hardware:
    """Return this CPU with its rates: for matrix products and attention those of the model's own shapes, for memory
    that of tensors as large as the model's stream."""
    products = _products_of(config, batch)
    seconds, flops = dict.fromkeys((True, False), 0.0), dict.fromkeys((True, False), 0.0)
    for key, calls in products.calls.items():
        op, layouts, named = key
        run = functools.partial(op, *map(_made, layouts), **{name: _made(one) for name, one in named})
        is_attention = ATTENTION in op._schema.name
        seconds[is_attention] += calls * shortest(run, rounds=3)
        flops[is_attention] += calls * products.work[key].flops
    x = torch.rand(batch * config.model.options.get("context_length", 128) * config.model.options["hidden_dim"])
    out = torch.empty_like(x)
    copy = shortest(lambda: torch.neg(x, out=out))
    curve = shortest(lambda: torch.ops.aten.gelu.out(x, out=out))
    drop = shortest(lambda: ops.dropout(x, 0.1))
    matmul = flops[False] / seconds[False]
    rates = Rates(
        matmul=matmul,
        attention=flops[True] / seconds[True] if seconds[True] else matmul,
        bandwidth=2.0 * x.nbytes / copy,
        exponentials=x.numel() / max(curve - copy, 1e-9),
        draws=x.numel() / max(drop - copy, 1e-9),
        kernel_seconds=_kernel_seconds(is_fused(config), torch.get_num_threads()),
    )
    memory = float(device_memory(torch.device("cpu")))
    name = f"{processor_name()}, {torch.get_num_threads()} threads"
    shares, links = (1.0, 1.0, 1.0), (1.0, 1.0)  # the rates are measured, and there are no links
    return Hardware(name, memory, rates.bandwidth, matmul, matmul, *shares, *links, measured=rates)


def _products_of(config: Config, batch: int) -> _Products:
    model = meta_model(config, depth_of(config)[0])
    with FakeTensorMode():
        call, _ = fake_step(model, model.example_inputs(batch, device="meta"))
        products = _Products()
        with products:
            call().backward()  # type: ignore[no-untyped-call]
    return products


@functools.cache  # a check takes it for each batch
def _kernel_seconds(fused: bool, threads: int) -> float:
    """Return what a kernel costs beside its work: a step of the smallest model, over its kernels."""
    config = compose("gpt_nano", [*_SMALLEST, *([] if fused else ["fusion=off"])])
    kind = "min_cut" if fused else EAGER
    one = count(config, kinds=[kind], tokens=None, dtype=torch.float32)[kind].step(1, num_layers=2)
    return shortest(training_step(config, 1)) / (one.forward.kernels + one.backward.kernels)
