from collections.abc import Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.cli.bench.cases import Settings
from fuselayers.cli.bench.measure import Subject
from fuselayers.cli.bench.subjects import ModelCall, model_subject, op_subject
from tests.cli.conftest import TINY_MODEL

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("without_inductor")


def model_of(name: str, overrides: Sequence[str], **options: Any) -> Subject:
    backends = options.pop("backends", ["eager"])
    defaults = {"shape": None, "dropout": None, "dtype": torch.float32, "device": CPU}
    return model_subject(ModelCall(name, tuple(overrides), **(defaults | options)), backends=backends)


def test_a_candidate_that_raises_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    @wraps(ops.rms_norm)
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(ops, "rms_norm", fails)
    subject = op_subject("rms_norm", Settings((2, 7, 64), torch.float32, CPU), backends=())
    assert subject.wrong["fuselayers"] == "RuntimeError: no kernel for this"


def test_a_model_is_compared_with_the_same_weights() -> None:
    subject = model_of("gpt_nano", TINY_MODEL, dropout=0.0)
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
