import sys
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.hooks import has_hooks, is_sharded


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_every_hook_of_the_module_itself_counts_until_it_is_removed(register: str) -> None:
    layer = nn.Linear(2, 3)
    handle = getattr(layer, register)(lambda *_: None)
    assert has_hooks(layer)
    assert not has_hooks(nn.Sequential(layer))
    handle.remove()
    assert not has_hooks(layer)


def test_what_fsdp_shards_by_itself(one_process_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    new = fully_shard(nn.Sequential(nn.Linear(2, 3)), mesh=one_process_mesh)
    old = FullyShardedDataParallel(nn.Linear(2, 3), device_id=torch.device("cpu"))
    assert [is_sharded(module) for module in (new, old, new[0], nn.Sequential(old))] == [True, True, False, False]
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    assert not is_sharded(new)
