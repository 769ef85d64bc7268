"""The engine of a training: one process, or PyTorch's own pieces over several (DDP, FSDP2, DTensor)."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .layout import Layout
from .processes import Processes
from .verify import placements


class Engine:
    """A model, whole in this process or split over the processes of torchrun; see `start_engine`.

    Args:
        module: the model, with its parameters under their own names.
        model: what forward calls where it is not the module: a wrapper around it.
        processes: of the run.
        layout: which of them computes what.

    >>> engine = Engine(nn.Linear(2, 1))
    >>> with engine.micro_batch(last=True):
    ...     engine.model(torch.ones(3, 2)).sum().backward()
    >>> bool(engine.clip(1.0) > 1)
    True
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        model: nn.Module | None = None,
        processes: Processes | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.module = module
        self.model = module if model is None else model
        self.processes = processes or Processes()
        self.layout = layout or Layout()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; only the last one of a step sends its gradients."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            with self.model.no_sync():
                yield
            return
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        yield

    def clip(self, limit: float) -> Tensor:
        """The norm of the whole gradient, over all processes; a larger one is scaled down to the limit.

        torch's own does not mix tensors and DTensors of several meshes.

        Args:
            limit: above 0; infinity scales nothing.
        """
        groups: dict[object, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
                groups[mesh].append(parameter)
        norms = [
            nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
            for group in groups.values()
        ]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.stack([norm.square() for norm in whole]).sum().sqrt() if len(whole) > 1 else whole[0]
        if not math.isinf(limit):
            for group in groups.values():
                nn.utils.clip_grads_with_norm_(group, limit, total)
        return total

    def describe(self) -> list[str]:
        """A line about the split that is in use, for the user; none for one process."""
        processes, layout = self.processes, self.layout
        if not processes.launched:
            return []
        return [
            f"{processes.world_size} process{'es' if processes.world_size > 1 else ''}, "
            f"dp {layout.dp} x tp {layout.tp}, {placements(self.module, self.model)}, "
            f"{torch.distributed.get_backend()}, {next(self.module.parameters()).device.type}"
        ]
