"""parallelize: two and four processes compute the numbers of a single process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fuselayers as fl
from fuselayers.components import Model, parallelize
from fuselayers.components.parallel.plan import make_plan
from tests.components.parallel.cases import CHECKS, COMPONENTS, SHIPPED, batch_of, errors_of, made, step
from tests.components.parallel.ranks import run

_EVERY_PAIR = [(name, sequence) for name in (*SHIPPED, *COMPONENTS, *CHECKS) for sequence in (False, True)]
# A quarter of the names, half of them with sequence parallelism. Each takes two processes a second.
_PAIRS = [pair for number, pair in enumerate(_EVERY_PAIR) if number % 16 in (0, 7)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[list[str | None]]:
    return run(2, errors_of, _PAIRS, folder=tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("number", range(len(_PAIRS)), ids=["-".join(map(str, pair)) for pair in _PAIRS])
def test_two_processes_compute_what_one_does(of_two: list[list[str | None]], number: int) -> None:
    for errors in of_two:
        assert errors[number] is None, errors[number]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_the_other_way(tmp_path: Path) -> None:
    pairs = [pair for pair in _EVERY_PAIR if pair not in _PAIRS]
    for errors in run(2, errors_of, pairs, folder=tmp_path, seconds=550):
        assert [error for error in errors if error is not None] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_processes_compute_what_one_does(tmp_path: Path) -> None:
    # Four processes cannot share two key-value heads.
    grouped = ("llama_tiny", "qwen3_tiny", "gemma2_tiny", "mistral_tiny", "mixtral_tiny")
    pairs = [pair for pair in _EVERY_PAIR if pair[0] not in grouped]
    for errors in run(4, errors_of, pairs, folder=tmp_path, seconds=550):
        assert [error for error in errors if error is not None] == []


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_keeps_the_plain_model() -> None:
    model = made("gated")
    before = dict(model.named_parameters())
    wanted = step(model, batch_of(model))
    model.zero_grad()
    assert parallelize(model, init_device_mesh("cpu", (1,)), sequence=True) is model
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert step(model, batch_of(model)).loss == wanted.loss


@pytest.mark.usefixtures("group_of_one")
def test_wrong_arguments_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(TypeError, match=re.escape("model must be a fuselayers.components.Model, got Linear")):
        parallelize(nn.Linear(2, 3), mesh)
    model = made("gated")
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh of the tensor-parallel processes, got int"):
        parallelize(model, 2)
    wrong = "mesh must have one dimension, got 2; pass the tensor-parallel dimension, as in mesh['tp']"
    with pytest.raises(ValueError, match=re.escape(wrong)):
        parallelize(model, init_device_mesh("cpu", (1, 1)))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="is a DTensor already; parallelize a plain model once, and shard it"):
        parallelize(model, mesh)


def _with(name: str, path: str, value: Any) -> Model:
    """Return a model of COMPONENTS with another part."""
    model = made(name)
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)
    return model


def _tied() -> Model:
    model = made("fused")
    model.head.weight = model.token.weight
    return model


# Fault -> model, number of processes, error.
_REFUSED = {
    "heads": (
        lambda: fl.build("gpt_nano", ["fusion=off"]),
        3,
        "blocks.0.attention has 4 heads, which 3 processes cannot share; use a group whose size divides 4, or build "
        "the model with another number",
    ),
    "key-value heads": (
        lambda: fl.build("qwen3_tiny", ["attention.num_heads=6", "fusion=off"]),
        3,
        "blocks.0.attention has 2 key-value heads, which 3 processes cannot share",
    ),
    "hidden values": (
        lambda: fl.build("vit_tiny", ["attention.num_heads=3", "attention.head_dim=8", "fusion=off"]),
        3,
        "blocks.0.feedforward has 128 hidden values, which 3 processes cannot share",
    ),
    "mixing": (
        lambda: fl.build("vit_tiny", ["attention=pooling", "fusion=off"]),
        2,
        "parallelize has no plan for blocks.0.attention, attention 'pooling'; use one of these, which have a plan: "
        "favor, linear, linformer, local, multi_head, nystrom",
    ),
    "reversible": (
        lambda: fl.build("gpt_nano", ["model.block=reversible", "fusion=off"]),
        2,
        "parallelize has no plan for blocks.0, block 'reversible'; use one of these, which have a plan: transformer",
    ),
    "unknown": (
        lambda: _with("separate", "norm", nn.LayerNorm(16)),
        2,
        "parallelize has no plan for norm, LayerNorm; use a component of this package, and parallelize before other "
        "code wraps it",
    ),
    "adapter": (
        lambda: _with("fused", "blocks.1.attention.out", nn.Sequential(nn.Linear(16, 16))),
        2,
        "blocks.1.attention.out must be a plain linear layer, which parallelize can split, got Sequential; parallelize "
        "the model before you put adapters around its layers",
    ),
    "tied": (
        _tied,
        2,
        "token.weight and head.weight are tied, and parallelize would untie them; tie them by an option of the "
        "model, such as tie_embeddings",
    ),
    "own parameter": (
        lambda: _with("fused", "blocks.0.feedforward.temperature", nn.Parameter(torch.ones(1))),
        2,
        "parallelize has no plan for the parameter blocks.0.feedforward.temperature",
    ),
    "own part": (
        lambda: _with("fused", "blocks.0.residual.extra", nn.Embedding(8, 8)),
        2,
        "parallelize has no plan for the parameter blocks.0.residual.extra.weight",
    ),
    "activation": (
        lambda: _with("fused", "blocks.0.feedforward.custom_activation", nn.Softmax(-1)),
        2,
        "blocks.0.feedforward has the activation 'gelu', and parallelize splits only activations that are "
        "known to be elementwise; use one of fuselayers.ops.ACTIVATIONS",
    ),
}


@pytest.mark.parametrize("wrong", _REFUSED)
def test_a_plan_that_cannot_be_right_is_refused(wrong: str) -> None:
    build, size, text = _REFUSED[wrong]
    with pytest.raises(ValueError, match=re.escape(text)):
        make_plan(build(), size)


def test_a_fused_model_has_the_plan_of_the_model_inside() -> None:
    plans = []
    for fusion in ("fusion=off", "fusion=eager", "fusion.scope=block"):
        model = fl.build("gpt_nano", [fusion])
        storages = make_plan(model, 2).storages
        path_of = {id(parameter): path for path, parameter in model.named_parameters()}
        plans.append(
            {
                path_of[id(module._parameters[name])]: storage
                for module, storage_of in storages.items()
                for name, storage in storage_of.items()
            }
        )
        assert plans[-1].keys() == set(path_of.values())
    assert plans[0] == plans[1] == plans[2]
