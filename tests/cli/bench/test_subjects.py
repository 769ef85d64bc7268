from typing import Any

import pytest
import torch

from fuselayers.cli.bench import subjects
from fuselayers.cli.bench.cases import Settings
from fuselayers.cli.bench.subjects import ModelCall, Subject, model_subject, op_subject
from fuselayers.configs import build

CPU = torch.device("cpu")
TINY = ["model.hidden_dim=16", "model.num_layers=1", "model.context_length=16", "attention.num_heads=2"]


def op_of(name: str, dropout: float) -> Subject:
    return op_subject(name, Settings((2, 7, 64), dropout, "gelu", torch.float32, CPU), backends=["eager"])


def model_of(name: str, overrides: list[str], **options: Any) -> Subject:
    backends = options.pop("backends", ["eager"])
    defaults = {"shape": None, "dropout": None, "dtype": torch.float32, "device": CPU}
    return model_subject(ModelCall(name, tuple(overrides), **(defaults | options)), backends=backends)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_is_timed(dropout: float) -> None:
    subject = op_of("dropout", dropout)
    assert [one.name for one in subject.candidates] == ["plain", "eager"]
    for candidate in subject.candidates:
        (output,) = candidate.call()
        assert (output == 0).double().mean().item() == pytest.approx(dropout, abs=0.06)


def test_a_model_is_compared_with_the_same_weights() -> None:
    subject = model_of("gpt_nano", TINY, dropout=0.0)
    plain, eager = subject.candidates
    assert plain.leaves[0] is not eager.leaves[0]
    torch.testing.assert_close(plain.call(), eager.call())
    assert "fused_mlp, 4 x 16 tokens, float32" in subject.title


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [("vit_tiny", (3,), "3 examples"), ("t5_tiny", (3, 5), "3 x 5 tokens"), ("bert_tiny", (3, 5), "3 x 5 tokens")],
)
def test_every_kind_of_model_has_a_subject(name: str, shape: tuple[int, ...], said: str) -> None:
    subject = model_of(name, [], shape=shape, dropout=0.0)
    assert f", {said}, float32" in subject.title
    assert subject.wrong == {}
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
