import math
from functools import partial
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from fuselayers.cli.bench import suite_models
from fuselayers.cli.bench.suite import Suite
from fuselayers.cli.bench.suite_models import MODELS, MODELS_ON_A_GPU, measure_models, models_table
from fuselayers.cli.plain_torch import plain_twin
from fuselayers.configs import build

CPU = torch.device("cpu")


def measure(*, deadline: float) -> tuple[Suite, list[str], list[int]]:
    suite = Suite(bandwidth=1e9)
    said: list[str] = []
    kept: list[int] = []
    measure_models(
        ["gpt_nano"],
        suite,
        dtype=torch.float32,
        device=CPU,
        repeats=2,
        deadline=deadline,
        say=said.append,
        keep=lambda suite: kept.append(len(suite.models)),
    )
    return suite, said, kept


@pytest.mark.slow
def test_every_candidate_with_and_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(suite_models, "FUSED", "eager")
    tiny = ("model.hidden_dim=16", "model.num_layers=1", "model.context_length=128", "attention.num_heads=2")
    monkeypatch.setattr(suite_models, "MODELS", MappingProxyType({"gpt_nano": tiny}))
    suite, said, kept = measure(deadline=math.inf)
    assert said == ["gpt_nano, dropout 0.1", "gpt_nano, dropout 0"]
    assert suite.failed == {}
    names = [row.candidate for row in suite.models if row.title == said[0]]
    assert names == ["plain", "torch.compile", "eager"]
    assert [(row.title, row.candidate) for row in suite.models] == [(title, name) for title in said for name in names]
    assert kept == [len(names), 2 * len(names)]
    for row in suite.models:
        assert 0 < row.median("forward") < row.median("forward_backward")
        assert row.kept > 0
    lines = models_table(suite.models)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert [row[0] for row in cells] == ["model", "---", *said]
    assert len({len(row) for row in cells}) == 1
    plain, compiled = suite.models[:2]
    assert cells[2][1:3] == ["8 x 128", f"{plain.median('forward') * 1e3:.2f}"]
    assert cells[2][4] == f"{plain.median('forward') / compiled.median('forward'):.2f}"


def test_models_without_time_are_named() -> None:
    suite, said, _ = measure(deadline=-math.inf)
    assert (suite.models, said) == ([], [])
    assert suite.left_out == ["gpt_nano, dropout 0.1", "gpt_nano, dropout 0"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_twin_of_one_size(name: str) -> None:
    model = build(name, list(MODELS[name]))
    assert sum(parameter.numel() for parameter in plain_twin(model).parameters()) == pytest.approx(650_000, rel=0.1)


@pytest.mark.parametrize("name", MODELS_ON_A_GPU)
def test_every_model_fills_a_gpu(name: str) -> None:
    """Four layers of GPT-2 small's size; gated ones have fewer weights in attention and more in the feed-forward."""
    with torch.device("meta"):
        model = build(name, list(MODELS_ON_A_GPU[name]))
        twin = plain_twin(model)
    assert sum(parameter.numel() for parameter in twin.parameters()) == pytest.approx(29e6, rel=0.15)
    gpu = torch.device("cuda")
    shape = suite_models._shape(name, gpu)
    assert shape == ((64,) if name == "vit_tiny" else (8, 1024))
    assert suite_models.models_on(gpu) is MODELS_ON_A_GPU
    assert suite_models.models_on(CPU) is MODELS


def test_the_workers_run_what_will_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = suite_models.model_calls_ahead(["gpt_nano"], torch.bfloat16, CPU)
    assert [(one.func, one.args[:2]) for one in calls] == [
        (suite_models._run_once, ("gpt_nano", dropout)) for dropout in (0.1, 0.0)
    ]
    ran: list[str] = []
    candidates = [SimpleNamespace(name="plain"), SimpleNamespace(name="inductor")]
    monkeypatch.setattr(suite_models, "_subject", lambda *_: SimpleNamespace(candidates=candidates))
    monkeypatch.setattr(suite_models, "results", lambda candidate: ran.append(candidate.name))
    assert calls[0]()
    assert ran == ["plain", "inductor"]
