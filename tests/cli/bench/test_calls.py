from typing import Any

import pytest
import torch

from fuselayers.cli.bench import calls
from fuselayers.cli.bench.calls import BARE, call_cost
from fuselayers.cli.bench.cases import Settings, op_case
from fuselayers.cli.bench.measure import EAGER, OURS
from tests.ops.contract import DEVICE

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("bias_activation_dropout", {"dropout": 0.5}),
        ("residual_layer_norm", {}),
    ],
)
def test_every_candidate_is_timed(op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_CALLS", 2)
    settings = {"shape": (2, 3, 64), "dropout": 0.0, "activation": "gelu", "dtype": torch.float32, "device": DEVICE}
    cost = call_cost("the op", op_case(op, Settings(**{**settings, **options})), readings=3, device=DEVICE)
    assert cost.title == "the op"
    assert list(cost.seconds) == [EAGER, OURS, BARE]
    for candidate, spans in cost.seconds.items():
        assert [len(readings) for readings in spans.values()] == [3, 3]
        assert 0 < cost.median(candidate, "forward") < cost.median(candidate, "forward_backward")
    assert cost.median(BARE, "forward") < cost.median(OURS, "forward")
