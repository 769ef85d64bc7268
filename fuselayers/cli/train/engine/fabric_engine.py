"""Lightning Fabric as the engine: its strategies hold the mesh and the wrappers, its calls run forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from lightning_fabric.strategies.strategy import Strategy
from torch import Tensor, nn

from .sharding import prepared
from .torch_engine import TorchEngine


class FabricEngine(TorchEngine):
    """A model over the processes of torchrun, set up and run by Lightning Fabric.

    `DDPStrategy` for ddp, else `ModelParallelStrategy`, which calls our own functions with its mesh. The losses are
    those of `TorchEngine`. The arguments and errors are too.
    """

    name = "fabric"

    def _set_up(self) -> None:
        layout = self.layout
        strategy: Strategy = DDPStrategy()
        if self.config.parallel.shard != "ddp":
            strategy = ModelParallelStrategy(self._split, data_parallel_size=layout.dp, tensor_parallel_size=layout.tp)
        # The process group is there already: Fabric joins it.
        self.fabric = Fabric(
            accelerator=self.device.type,
            devices=self.processes.local_size,
            num_nodes=self.processes.world_size // self.processes.local_size,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
            precision="32-true",
        )
        self.fabric.launch()
        if self.config.parallel.shard == "ddp":
            self.module = prepared(self.module, self.config)
        self.model = self._called = self.fabric.setup_module(self.module)

    def _split(self, module: nn.Module, mesh: Any) -> nn.Module:
        self.module = prepared(module, self.config, data=mesh["data_parallel"], tensor=mesh["tensor_parallel"])
        return self.module

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        super().attach(optimizer)
        self._wrapped: Any = self.fabric.setup_optimizers(optimizer)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with self.fabric.no_backward_sync(self._called, enabled=not last):
            yield

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss, model=self._called)

    def update(self) -> None:
        self._wrapped.step()
        self._wrapped.zero_grad(set_to_none=True)
