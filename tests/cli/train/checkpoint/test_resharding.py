"""What one layout of ranks writes, any other continues: the same bits of state, the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fuselayers
from fuselayers.cli.train.checkpoint import Texts, load_state, read_checkpoint, save, state_of, whole_tensors
from fuselayers.cli.train.optimizer import build_optimizer
from fuselayers.cli.train.randomness import seed_generators
from tests.cli.train.checkpoint import sharded
from tests.cli.train.checkpoint.sharded import build, resume, train

_STEPS_OF_A_STAGE = 2


def _stage(folder: str, layout: str) -> list[float]:
    """Continue the newest checkpoint for some steps; print and return their losses. Write what was loaded again."""
    checkpoints = Path(folder) / "checkpoints"
    model, optimizer = build(layout, seed=99)
    done = resume(model, optimizer, checkpoints)
    if done:
        save(Path(folder) / "copies", state_of(model, optimizer), step=done, keep=100)
    losses = [train(model, optimizer, done + number) for number in range(1, _STEPS_OF_A_STAGE + 1)]
    done += _STEPS_OF_A_STAGE
    save(checkpoints, state_of(model, optimizer), step=done, texts=Texts(curve=str(done)), keep=100)
    print(json.dumps(losses))
    return losses


@pytest.mark.parametrize(
    "stages",
    [
        [("fsdp", 2), ("fsdp", 4), ("tp", 2), ("single", 1), ("ddp", 2)],
        pytest.param(
            [("fsdp", 4), ("fsdp-tp", 4), ("ddp", 2), ("tp", 4), ("fsdp", 3), ("single", 1), ("fsdp-tp", 4)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["five", "seven"],
)
def test_a_run_goes_through_all_layouts(stages: list[tuple[str, int]], tmp_path: Path) -> None:
    model, optimizer = build("single", seed=99)
    wanted = [train(model, optimizer, step) for step in range(1, 2 * len(stages) + 1)]

    losses = []
    for layout, size in stages:
        if layout == "single":
            # Without a process group.
            losses += _stage(str(tmp_path), layout)
            continue
        ended = sharded.run(_stage, tmp_path, layout, size=size, store=tmp_path / "store")
        of_ranks = [json.loads(one.printed.splitlines()[0]) for one in ended]
        assert all(one == of_ranks[0] for one in of_ranks), layout
        losses += of_ranks[0]

    # Sums that tensor parallelism splits are rounded elsewhere.
    same = 2 * next(number for number, (layout, _) in enumerate(stages) if "tp" in layout)
    assert losses[:same] == wanted[:same]
    assert losses == pytest.approx(wanted, abs=1e-5)
    checkpoints = tmp_path / "checkpoints"
    for path in sorted(checkpoints.iterdir())[:-1]:
        written = whole_tensors(path, read_checkpoint(path))
        copy = tmp_path / "copies" / path.name
        loaded = whole_tensors(copy, read_checkpoint(copy))
        assert written.keys() == loaded.keys()
        assert all(torch.equal(written[name], loaded[name]) for name in written), path
    # Each rank has written its part, and a replicated model is written once.
    paths = sorted(checkpoints.iterdir())
    lengths = [sum(chunk.length for chunk in read_checkpoint(path).chunks()) for path in paths]
    assert lengths == len(stages) * [sum(tensor.nbytes for tensor in state_of(model, optimizer).values())]
    for path, (layout, size) in zip(paths, stages, strict=True):
        files = {chunk.file for chunk in read_checkpoint(path).chunks()}
        assert len(files) == size or layout == "ddp", layout


_MODELS = ("gpt_nano", "llama_tiny", "mixtral_tiny")


def _shipped(name: str, *, is_sharded: bool) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model: Any = fuselayers.build(name, ["fusion=off", "model.num_layers=2"])
    if is_sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model, build_optimizer(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))


def _step(model: nn.Module, optimizer: torch.optim.AdamW, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    tokens_BT = torch.randint(256, (2, 33), generator=generator)
    seed_generators(1, step=step)
    loss = model(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _train_shipped(folder: str) -> None:
    for name in _MODELS:
        model, optimizer = _shipped(name, is_sharded=True)
        losses = [_step(model, optimizer, step) for step in (1, 2)]
        save(Path(folder) / name, state_of(model, optimizer), step=2)
        print(json.dumps([*losses, _step(model, optimizer, 3)]))


@pytest.mark.slow
def test_one_process_continues_the_shipped_models_of_two_ranks(tmp_path: Path) -> None:
    ended = sharded.run(_train_shipped, tmp_path, size=2, store=tmp_path / "store")
    for name, line in zip((*_MODELS, "done"), ended[0].printed.splitlines(), strict=True):
        if name == "done":
            continue
        path = tmp_path / name / "step-000002"
        model, optimizer = _shipped(name, is_sharded=False)
        load_state(model, optimizer, read_checkpoint(path), path=path)
        alone, its = _shipped(name, is_sharded=False)
        assert json.loads(line) == [_step(alone, its, step) for step in (1, 2, 3)], name
        assert _step(model, optimizer, 3) == json.loads(line)[-1], name
