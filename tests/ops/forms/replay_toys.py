"""Ops with a stand-in for their kernel, for the tests of what is replayed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers.ops.forms import launch as launch_module
from fuselayers.ops.forms.dispatch import define
from fuselayers.ops.forms.replay import Replays


class Adding:
    """Stands for a Triton kernel, compiled or not: writes its first tensor and a number into its second."""

    def __init__(self) -> None:
        self.kinds: list[type] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Adding"]:
        def start(x: Tensor, y: Tensor, number: float, **options: Any) -> Adding:
            self.kinds.append(type(number))
            y.copy_(x.detach() + number)
            return self

        return start


adding = Adding()


def launch(x: Tensor, y: Tensor, number: float) -> None:
    launch_module.launch(adding, (1,), (x, y, number), ())


class Toy:
    """An op whose kernel is `start`, its replays, and how often it was worked out."""

    def __init__(self, run: Callable[..., Any], schema: str) -> None:
        self.forwards = 0
        self.op = define(schema, run, lambda x, *rest: torch.empty_like(x))

        def counted(*arguments: Any) -> Any:
            self.forwards += 1
            return self.op(*arguments)

        self.replays = Replays(counted)

    def call(self, *arguments: Any) -> Any:
        place = next((place for place, one in enumerate(arguments) if not isinstance(one, Tensor)), len(arguments))
        return self.replays(arguments[:place], arguments[place:])

    @property
    def written(self) -> list[str]:
        return [str(known.run.__doc__) for alike in self.replays._known.values() for known in alike]


def plus(x: Tensor, number: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    launch(rows, y.view(rows.shape), number)
    return y


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **kwargs or {})
