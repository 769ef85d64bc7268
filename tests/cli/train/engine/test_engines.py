"""The engine of several processes, in a group of this process alone; test_torchrun.py has real ones."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fuselayers.cli.train.data import read_text
from fuselayers.cli.train.engine import (
    Engine,
    Layout,
    Processes,
    device_of,
    fusion_for,
    start_engine,
)
from fuselayers.cli.train.loop import Trainer
from fuselayers.configs import Config, build, compose

_CPU = torch.device("cpu")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_SMALL = ["model.hidden_dim=16", "model.num_layers=2", "model.context_length=16", "attention.num_heads=2", "fusion=off"]


class Launched(Processes):
    """This process, as torchrun would start one."""

    @property
    def launched(self) -> bool:
        return True


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
    return start_engine(build(config), config, processes=Launched(), layout=Layout(), device=_CPU)


def _tokens(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(256, (rows, 16), generator=generator) for _ in range(2))  # type: ignore[return-value]


def _one_step(engine: Engine, *, micro_batches: int = 1) -> tuple[float, dict[str, Tensor]]:
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    for number in range(micro_batches):
        with engine.micro_batch(last=number == micro_batches - 1):
            (engine.model(*(one[number::micro_batches] for one in _tokens())) / micro_batches).backward()
    norm = engine.clip(0.5).item()
    optimizer.step()
    return norm, {name: _whole(one) for name, one in engine.module.state_dict().items()}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("overrides", [["parallel=ddp"], ["parallel=fsdp"], ["parallel=fsdp", "train.clip_norm=0"]])
def test_a_step_is_that_of_one_process(gloo: None, overrides: list[str], micro_batches: int) -> None:
    config = _config(*overrides, "model.dropout=0")
    torch.manual_seed(0)
    norm, expected = _one_step(Engine(build(config)), micro_batches=micro_batches)
    got_norm, got = _one_step(_engine(config), micro_batches=micro_batches)
    assert norm > 0.5
    assert got_norm == pytest.approx(norm, rel=1e-5)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


def test_no_limit_leaves_the_gradient(gloo: None) -> None:
    engine = _engine(_config("parallel=fsdp"))
    engine.model(*_tokens()).backward()
    before = [_local(one.grad).clone() for one in engine.module.parameters() if one.grad is not None]
    assert engine.clip(math.inf) > 0
    after = [_local(one.grad) for one in engine.module.parameters() if one.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_fsdp_gathers_bfloat16_and_sums_float32(gloo: None) -> None:
    engine = _engine(_config("parallel=fsdp", "train.precision=bfloat16", "fusion=off"))
    dtypes: list[torch.dtype] = []
    first: Any = engine.module.blocks[0]  # type: ignore[index]
    first.attention.register_forward_pre_hook(lambda module, _: dtypes.append(module.out.weight.dtype))
    engine.model(*_tokens()).backward()
    assert dtypes == [torch.bfloat16]
    assert {one.grad.dtype for one in engine.module.parameters() if one.grad is not None} == {torch.float32}


def test_what_is_in_use_is_said(gloo: None) -> None:
    (line,) = _engine(_config("parallel=fsdp")).describe()
    assert line == "1 process, dp 1 x tp 1, FSDP2 with 28 parameters (S(0)), gloo, cpu"
    (line,) = _engine(_config("parallel=ddp")).describe()
    assert line == "1 process, dp 1 x tp 1, DistributedDataParallel with 28 parameters whole, gloo, cpu"
    assert Engine(nn.Linear(2, 1)).describe() == []


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        ("fsdp", "parallel.shard=fsdp with dp 1 x tp 1 was asked for, and the model is a Decoder, not an FSDPModule"),
        ("ddp", "parallel.shard=ddp with dp 1 x tp 1 was asked for, and no module is DistributedDataParallel"),
    ],
)
def test_a_split_that_is_not_there_is_found_out(
    gloo: None, monkeypatch: pytest.MonkeyPatch, shard: str, text: str
) -> None:
    from fuselayers.cli.train.engine import start

    monkeypatch.setattr(start, "prepared", lambda module, *_, **__: module)
    monkeypatch.setattr(start, "DistributedDataParallel", lambda module, **_: module)
    with pytest.raises(RuntimeError) as caught:
        _engine(_config(f"parallel={shard}"))
    assert str(caught.value) == text


def test_a_layer_that_is_not_split_is_named(gloo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuselayers.cli.train.engine import sharding
    from fuselayers.cli.train.engine.verify import verify

    shard = sharding._shard

    def some(model: Any, *rest: Any) -> None:
        shard(model, *rest)
        model.norm.register_parameter("weight", nn.Parameter(torch.ones(16)))

    monkeypatch.setattr(sharding, "_shard", some)
    with pytest.raises(RuntimeError, match=r"was asked for, and norm\.weight is not split over dp$"):
        _engine(_config("parallel=fsdp"))
    with pytest.raises(RuntimeError, match=r"and no parameter is split over the tensor-parallel group$"):
        verify(nn.Linear(2, 1), nn.Linear(2, 1), _config().parallel, Layout(tp=2))


def test_one_device_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "^train.device=cuda:0 is one device for 1 processes; leave it at auto, and each takes the GPU of its LOCAL_"
    with pytest.raises(ValueError, match=text):
        device_of(_config("train.device=cuda:0"), Launched())
    assert device_of(_config("train.device=cpu"), Launched()) == _CPU
    processes = Launched()
    processes.local_rank = 2
    monkeypatch.setattr("fuselayers.cli.train.engine.start.choose_device", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = "^each process needs a GPU, and there are 2 on this machine; start torchrun with --nproc-per-node 2, or set "
    with pytest.raises(ValueError, match=text):
        device_of(_config(), processes)


def test_fsdp_fuses_blocks_and_says_so() -> None:
    fusion, said = fusion_for(_config("parallel=fsdp", "fusion=auto"))
    assert (fusion.scope, said) == (
        "block",
        "fsdp gathers the weights of one block at a time: fusion.scope is block",
    )
    assert fusion_for(_config("parallel=ddp", "fusion=auto")) == (_config("fusion=auto").fusion, None)


class _SeedsOnly(Engine):
    """Notes torch's seed at each micro-batch."""

    def __init__(self, module: nn.Module, *, processes: Processes, layout: Layout) -> None:
        super().__init__(module, processes=processes, layout=layout)
        self.seeds: list[int] = []

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.seeds.append(torch.initial_seed())
        yield


def test_masks_are_one_in_a_tensor_parallel_group_and_others_in_the_next(text_file: Path) -> None:
    config = _config("train.batch_size=4", "train.accumulate=2")
    model = build(config)
    text = read_text(str(text_file))
    processes = Launched()
    processes.world_size = 4

    def seeds(layout: Layout, step: int = 1) -> tuple[int, ...]:
        engine = _SeedsOnly(model, processes=processes, layout=layout)
        Trainer(model, text, config=config.train, sequence_length=16, device=_CPU, engine=engine).step(step)
        return tuple(engine.seeds)

    assert seeds(Layout(2, 2, 0)) == seeds(Layout(2, 2, 0)) == seeds(Layout(4, 1, 0))
    drawn = [seeds(Layout(2, 2, 0)), seeds(Layout(2, 2, 1)), seeds(Layout(4, 1, 3)), seeds(Layout(2, 2, 0), 2)]
    assert len({seed for of_a_step in drawn for seed in of_a_step}) == 8
