"""What the training loop needs of an engine. This one: a model in one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .layout import Layout
from .processes import Processes


class Engine:
    """A model in this process alone; the base of the engines for several processes.

    Attributes:
        module: the model, with its parameters under their own names.
        model: what forward calls: the module, or a wrapper around it.
        optimizer: of the module's parameters; see `attach`.
        processes: of the run.
        layout: which of them computes what.

    >>> engine = Engine(nn.Linear(2, 1))
    >>> engine.attach(torch.optim.SGD(engine.module.parameters(), lr=0.1))
    >>> with engine.micro_batch(last=True):
    ...     engine.backward(engine.model(torch.ones(3, 2)).sum())
    >>> bool(engine.clip(1.0) > 1)
    True
    >>> engine.update()
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, module: nn.Module, *, processes: Processes | None = None, layout: Layout | None = None) -> None:
        self.module = module
        self.model = module
        self.processes = processes or Processes()
        self.layout = layout or Layout()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer of the module's parameters."""
        self.optimizer = optimizer

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; only the last one of a step sends its gradients."""
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, limit: float) -> Tensor:
        """The norm of the whole gradient, over all processes; a larger one is scaled down to the limit.

        Args:
            limit: above 0; infinity scales nothing.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), limit)

    def update(self) -> None:
        """Update the weights, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def describe(self) -> list[str]:
        """Lines about the engine that is in use, for the user; none for one process."""
        return []
