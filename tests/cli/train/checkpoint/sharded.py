"""A small model, split over ranks in several ways, that trains a few steps: for the tests of saving and resharding.

Every rank has the same batches, so the losses of a replicated model, and of one whose parameters are gathered before
use, are those of one process to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from fuselayers.cli.train.checkpoint import Texts, load_state, newest, read_checkpoint
from fuselayers.cli.train.randomness import seed_generators
from tests.processes import Ended, Program

WIDTH = 12


class Model(nn.Module):
    """Three outputs: over four ranks one of them has no row of the head."""

    def __init__(self, *, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + torch.dropout(self.down(torch.relu(self.up(x))), 0.1, self.training))
        return self.head(x)


def split(model: Model, layout: str) -> nn.Module:
    """The model as one process has it ("single"), or by "ddp", "fsdp", "tp", or tensor parallelism in "fsdp-tp"."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp":
        return fully_shard(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "tp":
        return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    if layout == "fsdp-tp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        return fully_shard(model, mesh=mesh["dp"])
    assert layout == "single"
    return model


def build(layout: str, *, seed: int = 0, width: int = WIDTH) -> tuple[nn.Module, torch.optim.AdamW]:
    """The model and its AdamW; another seed gives other weights."""
    torch.manual_seed(seed)
    model = split(Model(width=width), layout)
    # torch's fused and foreach forms do not take parameters on several meshes.
    fused = "tp" not in layout
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=fused, foreach=False)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of a step, in training: a function of the weights and the step."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(high, (8,), generator=generator) for high in (19, 3))
    seed_generators(7, step=step)
    return cross_entropy(model.train()(tokens), targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step; its loss."""
    loss = loss_of(model, step)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def resume(model: nn.Module, optimizer: torch.optim.AdamW, folder: Path) -> int:
    """Load the newest checkpoint of a folder; its step, or 0 if there is none."""
    path = newest(folder)
    if path is None:
        return 0
    checkpoint = read_checkpoint(path)
    assert checkpoint.texts == Texts(curve=str(checkpoint.step))
    load_state(model, optimizer, checkpoint, path=path)
    return checkpoint.step


@contextmanager
def process_group(rank: int, size: int, store: Path) -> Iterator[None]:
    """A gloo group of the ranks that give the same store, a file that is not there yet."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


_PROGRAM = """
import sys
from pathlib import Path
from {module} import {function}
from tests.cli.train.checkpoint.sharded import process_group
rank, size, store, *arguments = sys.argv[1:]
with process_group(int(rank), int(size), Path(store)):
    {function}(*arguments)
    # gloo may abort a process at its exit.
    print("done", flush=True)
"""
_ROOT = Path(__file__).parents[4]


def run(function: Callable[..., None], *arguments: object, size: int, store: Path) -> list[Ended]:
    """Run a function of a test module on each rank of a group, with texts as arguments.

    Raises:
        AssertionError: a rank did not come to its end.
    """
    program = _PROGRAM.format(module=function.__module__, function=function.__name__)
    texts = [str(argument) for argument in arguments]
    store.unlink(missing_ok=True)
    programs = [Program(program, str(rank), str(size), str(store), *texts, folder=_ROOT) for rank in range(size)]
    ended = [program.wait() for program in programs]
    for one in ended:
        assert one.printed.endswith("done\n"), one.errors[-3000:]
    return ended
