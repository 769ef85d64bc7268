"""PyTorch's own engine: DistributedDataParallel, FSDP2 (`fully_shard`) and DTensor."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ....configs import Config
from .base import Engine
from .layout import Layout
from .processes import Processes
from .sharding import prepared
from .verify import placements, verify


class TorchEngine(Engine):
    """A model over the processes of torchrun; arguments and errors are those of `start_engine`."""

    name = "torch"

    def __init__(
        self, module: nn.Module, config: Config, *, processes: Processes, layout: Layout, device: torch.device
    ) -> None:
        super().__init__(module, processes=processes, layout=layout)
        self.config = config
        self.device = device
        if config.parallel.shard != "fsdp" or layout.tp > 1:
            # FSDP2 alone takes the weights to the device in parts.
            module.to(device)
        self._set_up()
        verify(self.module, self.model, config.parallel, layout)

    def _set_up(self) -> None:
        mesh = self.layout.mesh(self.device)
        self.module = self.model = prepared(self.module, self.config, data=mesh["dp"], tensor=mesh["tp"])
        if self.config.parallel.shard == "ddp":
            device_ids = [self.device] if self.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.module, device_ids=device_ids)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        if isinstance(self.model, DistributedDataParallel) and not last:
            with self.model.no_sync():
                yield
            return
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        yield

    def clip(self, limit: float) -> Tensor:
        return clip_gradients(self.module, limit)

    def describe(self) -> list[str]:
        processes, layout = self.processes, self.layout
        return [
            f"engine {self.name}: {processes.world_size} process{'es' if processes.world_size > 1 else ''}, "
            f"dp {layout.dp} x tp {layout.tp}, {placements(self.module, self.model)}, "
            f"{torch.distributed.get_backend()}, {self.device.type}"
        ]


def clip_gradients(module: nn.Module, limit: float) -> Tensor:
    """`Engine.clip` of parameters that are tensors, or DTensors of several meshes, which torch's own does not mix."""
    groups: dict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.grad is not None:
            groups[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    norms = [nn.utils.get_total_norm([one.grad for one in group if one.grad is not None]) for group in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack([norm.square() for norm in whole]).sum().sqrt() if len(whole) > 1 else whole[0]
    if not math.isinf(limit):
        for group in groups.values():
            nn.utils.clip_grads_with_norm_(group, limit, total)
    return total
