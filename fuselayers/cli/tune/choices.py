"""Which backend serves each fused graph of a model best: measured by "auto", ahead of time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...configs import build, compose
from ...partition import warm_up
from ...partition.auto import fastest
from ...partition.backends import AUTO_ORDER, why_unavailable
from ...partition.report import identity_of
from ...partition.timer import Step, median_seconds, time_in_turns
from ...partition.timings import measured_anew
from ..example import example_batch

_ROUNDS = 101
_SECONDS = 10.0


@dataclass(frozen=True)
class Tuned:
    """A model in one use.

    Attributes:
        use: "training", which is forward and backward, or "forward".
        graphs: the seconds of each candidate of each graph, under the graph's name; None if one does not work.
        eager: seconds of the model without fusion.
        fused: seconds of the model with the fastest candidate for each graph.
    """

    use: str
    graphs: Mapping[str, Mapping[str, float | None]]
    eager: float
    fused: float


def tune_model(
    overrides: Sequence[str],
    *,
    batch_size: int | None,
    device: torch.device,
    keep: bool,
    say: Callable[[Tuned], object],
) -> list[Tuned]:
    """Measure all backends for every fused graph of a model, in training and forward alone, and time the whole model.

    Args:
        overrides: of the config.
        batch_size: examples at once; None is the config's `train.batch_size`.
        device: where the model is.
        keep: whether the times are stored for later processes.
        say: is called with each result as soon as it is known.

    Raises:
        ValueError: an override that does not fit, a model in which nothing is fused, or one that does not say what it
            is called with.
    """
    config = compose("gpt_nano", overrides)
    if config.fusion.scope == "none":
        raise ValueError("nothing in this model is fused, so there is nothing to choose; take fusion=auto")
    plain: Any = build(replace(config, fusion=replace(config.fusion, scope="none"))).to(device)
    inputs = example_batch(plain, config, (batch_size or config.train.batch_size,), device=device)
    tuned = []
    for use in ("training", "forward"):
        torch.compiler.reset()  # every graph is measured again
        model = build(replace(config, fusion=replace(config.fusion, backend="auto"))).to(device)
        model.load_state_dict(plain.state_dict())
        steps = {"eager": Step(partial(_step, plain, inputs, use)), "fused": Step(partial(_step, model, inputs, use))}
        with warm_up(0), measured_anew(device.type, keep=keep) as graphs:
            # The warm-up measures the graphs.
            times = time_in_turns(steps, device=device, rounds=_ROUNDS, seconds=_SECONDS, warm_up=3)
        tuned.append(Tuned(use, graphs, **median_seconds(times)))
        say(tuned[-1])
    return tuned


def pinned(tuned: Sequence[Tuned], device_type: str = "cpu") -> str:
    """Return the backend that a config names to pin these choices.

    A graph that was not measured, as one that draws torch's own random numbers, keeps the first backend of "auto".

    >>> pinned([Tuned("forward", {"one(float32[3]) forward [0a0b0c0d]": {"plain": 1.0}}, 2.0, 1.0)]).partition("+")[2]
    '0a0b0c0d:plain'
    """
    chosen = {identity_of(name): fastest(seconds) for one in tuned for name, seconds in one.graphs.items()}
    first = next(name for name in AUTO_ORDER if why_unavailable(name, {device_type}) is None)
    return "+".join([f"pinned:{first}", *(f"{graph}:{name}" for graph, name in chosen.items() if name != first)])


def _step(model: Any, inputs: Sequence[Tensor], use: str, _: object) -> None:
    """Run a forward, with its backward in training."""
    model.train(use == "training")
    with torch.set_grad_enabled(use == "training"):
        outputs = model(*inputs)
    if use == "training":
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        reached = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        weights = [torch.ones_like(one) for one in reached]
        torch.autograd.grad(reached, tuple(model.parameters()), weights, allow_unused=True)
