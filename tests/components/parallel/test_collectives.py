from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fuselayers.components.parallel.collectives import Group, total


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Group]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield Group(dist.group.WORLD.group_name, rank=0, size=1)
    finally:
        dist.destroy_process_group()


def test_the_gradients_of_two_terms_are_two_tensors(alone: Group) -> None:
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    ((total(first, alone) + total(second, alone)) * torch.ones(3)).sum().backward()
    first.grad.mul_(5)
    assert second.grad.tolist() == [1, 1, 1]
