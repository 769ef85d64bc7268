from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.cli.bench import subjects
from fuselayers.cli.bench.cases import Settings
from fuselayers.cli.bench.measure import Subject
from fuselayers.cli.bench.subjects import ModelCall, model_subject, op_subject
from fuselayers.configs import build

CPU = torch.device("cpu")
TINY = ["model.hidden_dim=16", "model.num_layers=1", "model.context_length=16", "attention.num_heads=2"]


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate runs op by op; that compiled ones can be measured is tested with the command."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def op_of(name: str, dropout: float) -> Subject:
    return op_subject(name, Settings((2, 7, 64), torch.float32, CPU, dropout=dropout), backends=["eager"])


def model_of(name: str, overrides: list[str], **options: Any) -> Subject:
    backends = options.pop("backends", ["eager"])
    defaults = {"shape": None, "dropout": None, "dtype": torch.float32, "device": CPU}
    return model_subject(ModelCall(name, tuple(overrides), **(defaults | options)), backends=backends)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_is_timed(dropout: float) -> None:
    subject = op_of("dropout", dropout)
    assert [candidate.name for candidate in subject.candidates] == ["plain", "torch.compile", "fuselayers", "eager"]
    for candidate in subject.candidates:
        (output,) = candidate.call()
        assert (output == 0).double().mean().item() == pytest.approx(dropout, abs=0.06)


@pytest.mark.parametrize("wrong_at", [0.0, 0.3])
def test_wrong_numbers_are_not_timed(wrong_at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout an op is held against plain torch, with it against the library's formula."""
    right = ops.bias_dropout_residual

    def wrong(x: Tensor, residual: Tensor, *, p: float, backend: str = "auto", **others: Tensor) -> Tensor:
        y = right(x, residual, p=p, backend=backend, **others)
        return y * 1.01 if p == wrong_at and backend == "auto" else y

    monkeypatch.setattr(ops, "bias_dropout_residual", wrong)
    subject = op_of("bias_dropout_residual", 0.3)
    assert list(subject.wrong) == ["fuselayers", "eager"]
    assert all(reason.startswith("output 0 is off by") for reason in subject.wrong.values())
    assert [candidate.name for candidate in subject.candidates] == ["plain", "torch.compile"]


def test_a_candidate_that_raises_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(ops, "rms_norm", fails)
    assert op_of("rms_norm", 0.0).wrong["fuselayers"] == "RuntimeError: no kernel for this"


def test_a_model_is_compared_with_the_same_weights() -> None:
    subject = model_of("gpt_nano", TINY, dropout=0.0)
    plain, compiled, eager = subject.candidates
    assert (plain.name, compiled.name, eager.name) == ("plain", "torch.compile", "eager")
    assert plain.leaves[0] is not eager.leaves[0]
    torch.testing.assert_close(plain.call(), eager.call())
    assert (subject.title, subject.shape) == ("gpt_nano, 7,664 parameters, fused_mlp", (4, 16))


@pytest.mark.parametrize(("name", "shape"), [("vit_tiny", (3,)), ("t5_tiny", (3, 5)), ("bert_tiny", (3, 5))])
def test_every_kind_of_model_has_a_subject(name: str, shape: tuple[int, ...]) -> None:
    subject = model_of(name, [], shape=shape, dropout=0.0)
    assert (subject.shape, subject.wrong) == (shape, {})
    (loss,) = subject.candidates[0].call()
    assert 0.5 < loss.item() < 10


@pytest.mark.parametrize(("dropout", "skipped"), [(0.0, 0.0), (0.25, 0.5)])
def test_dropout_reaches_every_component(dropout: float, skipped: float, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[torch.nn.Module] = []
    monkeypatch.setattr(subjects, "build", lambda config: built.append(build(config)) or built[-1])
    layer = "{at: 0, feedforward: {name: mlp, dropout: 0.4}, attention: {dropout: 0.2}}"
    experts = ["feedforward=mixture_of_experts", "feedforward.expert.dropout=0.3", "feedforward.num_experts=2"]
    overrides = [*experts, f"model.layers=[{layer}]", "residual.stochastic_depth=0.5"]
    model_of("gpt2_tiny", overrides, dropout=dropout, backends=[])
    for model in built:
        parts = dict(model.named_modules())
        names = ("blocks.0.feedforward", "blocks.0.attention", "blocks.1.feedforward.experts.0", "blocks.1.attention")
        assert [parts[name].dropout for name in names] == [dropout] * 4
        assert parts["blocks.1.residual"].skipped == skipped
