"""What became of a model: a wrapper that is missing would train without a word."""

from collections import Counter

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ....configs import ParallelConfig
from .layout import Layout


def verify(module: nn.Module, model: nn.Module, parallel: ParallelConfig, layout: Layout) -> None:
    """Compare what is in use with what was asked for.

    Raises:
        RuntimeError: it is something else.
    """
    parameters = dict(module.named_parameters())
    found = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    problems = []
    if parallel.shard == "ddp" and not found:
        problems.append("no module is DistributedDataParallel")
    if parallel.shard == "fsdp":
        if not isinstance(module, FSDPModule) or found:
            problems.append(f"the model is a {type(module).__name__}, not an FSDPModule")
        problems += [f"{name} is not split over dp" for name, one in parameters.items() if not _is_split_by_fsdp(one)]
    if layout.tp > 1 and not any(isinstance(one, DTensor) for one in parameters.values()):
        problems.append("no parameter is split over the tensor-parallel group")
    if problems:
        raise RuntimeError(
            f"parallel.shard={parallel.shard} with dp {layout.dp} x tp {layout.tp} was asked for, and {problems[0]}"
        )


def _is_split_by_fsdp(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    dimensions = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    # Beside tensor parallelism torch has a placement of its own, which is no Shard.
    return any(
        name == "dp" and not (placement.is_replicate() or placement.is_partial()) for name, placement in dimensions
    )


def placements(module: nn.Module, model: nn.Module) -> str:
    """The kind of wrapper, and how many parameters have which placements.

    >>> placements(nn.Linear(2, 3), nn.Linear(2, 3))
    'Linear with 2 parameters whole'
    """
    counts = Counter(
        f"({', '.join(map(str, one.placements))})" if isinstance(one, DTensor) else "whole"
        for one in module.parameters()
    )
    wrapper = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), module)
    kind = "FSDP2" if isinstance(module, FSDPModule) else type(wrapper).__name__
    return f"{kind} with {', '.join(f'{count} parameters {kind}' for kind, count in counts.items())}"
