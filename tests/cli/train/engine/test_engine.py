"""The engine of several processes, in a group of one process; test_torchrun.py has larger groups."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fuselayers.cli.train.engine import ALONE, Engine, Processes, device_of, fusion_of, start_engine, with_cuda_graphs
from fuselayers.configs import Config, build, compose

_CPU = torch.device("cpu")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_SMALL = ["model.hidden_dim=16", "model.num_layers=2", "model.context_length=16", "attention.num_heads=2", "fusion=off"]


@pytest.fixture
def gloo() -> Iterator[None]:
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _config(*overrides: str) -> Config:
    return compose("gpt_nano", [*_SMALL, *overrides])


def _engine(config: Config) -> Engine:
    torch.manual_seed(0)
    model = build(config, ["fusion=off"])  # the engine fuses it
    return start_engine(model, config, processes=Processes(launched=True), device=_CPU)


def _tokens(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(256, (rows, 16), generator=generator) for _ in range(2))  # type: ignore[return-value]


def test_no_limit_leaves_the_gradient(gloo: None) -> None:
    engine = _engine(_config("parallel=fsdp"))
    engine.model(*_tokens()).backward()
    before = [_local(weight.grad).clone() for weight in engine.module.parameters() if weight.grad is not None]
    assert engine.clip(math.inf) > 0
    after = [_local(weight.grad) for weight in engine.module.parameters() if weight.grad is not None]
    assert all(map(torch.equal, before, after))


def test_fsdp_gathers_bfloat16_and_sums_float32(gloo: None) -> None:
    engine = _engine(_config("parallel=fsdp", "train.precision=bfloat16"))
    dtypes: list[torch.dtype] = []
    first: Any = engine.module.blocks[0]  # type: ignore[index]
    first.attention.register_forward_pre_hook(lambda module, _: dtypes.append(module.out.weight.dtype))
    engine.model(*_tokens()).backward()
    assert dtypes == [torch.bfloat16]
    assert {weight.grad.dtype for weight in engine.module.parameters() if weight.grad is not None} == {torch.float32}


def test_one_device_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "^train.device=cuda:0 is one device for 1 processes; leave it at auto, so that each uses the GPU of its L"
    with pytest.raises(ValueError, match=text):
        device_of(_config("train.device=cuda:0"), Processes(launched=True))
    assert device_of(_config("train.device=cpu"), Processes(launched=True)) == _CPU
    processes = Processes(local_rank=2, launched=True)
    monkeypatch.setattr("fuselayers.cli.train.engine.engine.choose_device", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = "^each process needs a GPU, and this machine has 2; start torchrun with --nproc-per-node 2, or set train"
    with pytest.raises(ValueError, match=text):
        device_of(_config(), processes)


def test_fsdp_fuses_blocks() -> None:
    assert fusion_of(_config("parallel=fsdp", "fusion=auto", "fusion.scope=model")).scope == "block"
    assert fusion_of(_config("parallel=ddp", "fusion=auto")) == _config("fusion=auto").fusion


def test_one_process_on_a_gpu_trains_in_cuda_graphs() -> None:
    fusion, why_not = with_cuda_graphs(compose().fusion, processes=ALONE, device=torch.device("cuda"))
    assert (fusion.scope, fusion.cuda_graphs, why_not) == ("model", True, None)


@pytest.mark.parametrize(
    ("overrides", "processes", "text"),
    [
        (("fusion.cuda_graphs=false",), ALONE, "fusion.cuda_graphs is false"),
        (("fusion=off",), ALONE, "nothing is fused; fusion=auto fuses"),
        (("fusion=eager",), ALONE, "the backend eager captures none; fusion=auto does"),
        ((), Processes(launched=True), "they were not tried with several processes; fusion.scope=model fusion.cuda_gr"),
    ],
)
def test_the_fusion_stays_where_there_are_no_cuda_graphs(
    overrides: tuple[str, ...], processes: Processes, text: str
) -> None:
    asked = compose(overrides=list(overrides)).fusion
    fusion, why_not = with_cuda_graphs(asked, processes=processes, device=torch.device("cuda"))
    assert fusion == asked
    assert str(why_not).startswith(text)


def test_a_setting_of_cuda_graphs_is_kept() -> None:
    asked = compose(overrides=["fusion.scope=model", "fusion.cuda_graphs=true"]).fusion
    assert with_cuda_graphs(asked, processes=Processes(launched=True), device=torch.device("cuda")) == (asked, None)
    sharded = fusion_of(compose(overrides=["fusion.scope=model", "fusion.cuda_graphs=true", "parallel=fsdp"]))
    assert (sharded.scope, sharded.cuda_graphs) == ("block", None)
