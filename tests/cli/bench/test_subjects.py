from dataclasses import replace

import pytest
import torch

from fuselayers.cli.bench import subjects
from fuselayers.cli.bench.cases import Settings
from fuselayers.cli.bench.measure import disagreement, results
from fuselayers.cli.bench.subjects import model_subject, op_subject
from fuselayers.configs import build

SETTINGS = Settings((2, 7, 64), dropout=0.5, activation="gelu", dtype=torch.float32, device=torch.device("cpu"))
TINY = ["model.hidden_dim=16", "model.num_layers=1", "model.context_length=16", "attention.num_heads=2"]


def model_of(shape: tuple[int, ...] | None = None, dropout: float | None = None) -> subjects.Subject:
    return model_subject(
        "gpt_nano",
        TINY,
        shape=shape,
        dropout=dropout,
        backends=["eager"],
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_an_op_is_held_against_plain_torch_without_dropout() -> None:
    subject = op_subject("bias_dropout_residual", SETTINGS, backends=["eager"])
    assert [check.timed.name for check in subject.checks] == ["plain", "eager"]
    assert subject.title.startswith("op bias_dropout_residual: x [2, 7, 64] residual [2, 7, 64] bias [64], p 0.5")
    (proof,) = subject.checks[1].proofs
    got, exact = results(proof.checked), results(proof.truth)
    for one, other in zip(got.outputs + got.gradients, exact.outputs + exact.gradients, strict=True):
        torch.testing.assert_close(one, other.float())


def test_what_is_timed_does_drop() -> None:
    still = op_subject("dropout", replace(SETTINGS, dropout=0.0), backends=["eager"])
    dropped = op_subject("dropout", SETTINGS, backends=["eager"])
    for subject, share in ((still, 0.0), (dropped, 0.5)):
        for check in subject.checks:
            (output,) = check.timed.call()
            assert (output == 0).double().mean().item() == pytest.approx(share, abs=0.06)


def test_a_model_is_compared_with_the_same_weights() -> None:
    subject = model_of(dropout=0.0)
    plain, eager = (check.timed for check in subject.checks)
    assert plain.leaves[0] is not eager.leaves[0]
    (first,), (second,) = plain.call(), eager.call()
    torch.testing.assert_close(first, second)
    assert "fused_mlp, 4 x 16 tokens, float32" in subject.title


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [("vit_tiny", (3,), "3 examples"), ("t5_tiny", (3, 5), "3 x 5 tokens"), ("bert_tiny", (3, 5), "3 x 5 tokens")],
)
def test_every_kind_of_model_has_a_subject(name: str, shape: tuple[int, ...], said: str) -> None:
    device = torch.device("cpu")
    subject = model_subject(name, [], shape=shape, dropout=0.0, backends=["eager"], dtype=torch.float32, device=device)
    assert f", {said}, float32" in subject.title
    (plain, proved) = subject.checks
    assert (
        disagreement(results(proved.timed), eager=results(plain.timed), truth=results(proved.proofs[0].truth)) is None
    )
    (loss,) = plain.timed.call()
    assert 0.5 < loss.item() < 10


@pytest.mark.parametrize(("dropout", "skipped"), [(0.0, 0.0), (0.25, 0.5)])
def test_dropout_reaches_every_part(dropout: float, skipped: float, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[torch.nn.Module] = []
    monkeypatch.setattr(subjects, "build", lambda config: built.append(build(config)) or built[-1])
    layer = "{at: 0, feedforward: {name: mlp, dropout: 0.4}, attention: {dropout: 0.2}}"
    experts = ["feedforward=mixture_of_experts", "feedforward.expert.dropout=0.3", "feedforward.num_experts=2"]
    model_subject(
        "gpt2_tiny",
        [*experts, f"model.layers=[{layer}]", "residual.stochastic_depth=0.5"],
        shape=None,
        dropout=dropout,
        backends=[],
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for model in built:
        parts = dict(model.named_modules())
        names = ("blocks.0.feedforward", "blocks.0.attention", "blocks.1.feedforward.experts.0", "blocks.1.attention")
        assert [parts[name].dropout for name in names] == [dropout] * 4
        assert parts["blocks.1.residual"].skipped == skipped


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^no op 'dropot'; did you mean 'dropout'\?"):
        op_subject("dropot", SETTINGS, backends=["eager"])
    with pytest.raises(
        ValueError, match=r"^a model's --shape must be sequences x tokens, with at most 16 tokens, as 4x16;"
    ):
        model_of(shape=(2, 17))
