from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fuselayers.cli.plan.layout import Layout
from fuselayers.cli.plan.memory import Memory, largest_batch, memory_of, parameters_of_a_rank
from fuselayers.cli.plan.model import Sizes
from tests.cli.plan.conftest import TOY


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 7, bias=False))


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Four processes of which only the first exists, and whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_a_rank_of_fsdp_holds_what_fully_shard_gives_it() -> None:
    model = _model()
    shapes = [tuple(one.shape) for one in model.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    held = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]
    # 3 of 10 rows, and 2 of 7.
    assert parameters_of_a_rank(shapes, dp=4, tp=1) == held == 3 * 6 + 3 + 3 + 3 + 2 * 10


def test_weights_gradients_and_optimizer_are_what_pytorch_allocates() -> None:
    model = _model()
    shapes = tuple(tuple(one.shape) for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    float32 = replace(TOY, sizes=Sizes((), shapes, 1, 0.0), precision="float32")
    memory = memory_of(float32, Layout(dp=1), batch=0)
    assert memory.weights == sum(one.nbytes for one in model.parameters())
    assert memory.gradients == sum(one.nbytes for one in gradients)
    assert memory.optimizer == sum(one.nbytes for one in moments)


def _memory(layout: Layout) -> Memory:
    return memory_of(TOY, layout, batch=2)


def test_ddp_holds_everything() -> None:
    memory = _memory(Layout(dp=4, shard="ddp"))
    parameters = 4 * 1000 + 200
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert memory.copies == 2 * parameters
    assert memory.saved == 2 * (100 + 4 * 300)
    assert memory.working == 64


def test_fsdp_divides_states_and_gathers_two_layers() -> None:
    memory = _memory(Layout(dp=4, shard="fsdp"))
    assert memory.weights == 4 * (4 * 250 + 50)
    assert memory.optimizer == 2 * memory.weights
    assert memory.copies == 2 * 2 * 1000 + 4 * 1000  # two layers in bfloat16, the gradients of one in float32


@pytest.mark.parametrize(
    ("sequence", "saved"), [(False, 2 * (100 + 4 * (100 + 200 / 2))), (True, 2 * (100 + 4 * 300) / 2)]
)
def test_tensor_parallelism_divides_the_inside_and_sequence_parallelism_the_rest(sequence: bool, saved: float) -> None:
    memory = _memory(Layout(dp=1, tp=2, sequence=sequence))
    assert memory.saved == saved
    assert memory.weights == 4 * (4 * (20 * 20 + 200) + 10 * 10)  # vectors are whole on each rank


def test_recomputed_blocks_save_their_inputs_and_one_block_at_a_time() -> None:
    memory = _memory(Layout(dp=1, checkpointing="block"))
    assert memory.saved == 2 * (100 + 4 * 40)
    assert memory.working == 64 + 2 * 300


def test_the_largest_batch_is_the_last_that_fits() -> None:
    def memory_for(batch: float) -> Memory:
        return memory_of(TOY, Layout(dp=1), batch=batch)

    limit = memory_for(7).total
    assert largest_batch(memory_for, limit) == 7
    assert largest_batch(memory_for, limit - 1) == 6
    assert largest_batch(memory_for, memory_for(1).total - 1) == 0
