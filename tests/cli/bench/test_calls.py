import pytest
import torch

from fuselayers.cli.bench.calls import BARE, CallCost, call_cost
from fuselayers.cli.bench.cases import Settings, op_case
from fuselayers.cli.bench.measure import OURS
from fuselayers.cli.main import main
from fuselayers.ops.implementations.launch import why_no_kernels
from fuselayers.testing.meter import metered
from tests.ops.contract import DEVICE


def cost_of(op: str, *, dropout: float = 0.0) -> CallCost:
    settings = Settings((2, 3, 64), dropout=dropout, activation="gelu", dtype=torch.float32, device=DEVICE)
    return call_cost("the op", op_case(op, settings), readings=2, device=DEVICE)


@pytest.mark.kernels
@pytest.mark.parametrize("op", ["bias_activation_dropout", "residual_layer_norm", "rotary", "cross_entropy"])
def test_both_candidates_are_timed_and_nothing_is_launched(op: str) -> None:
    with metered() as launches:
        cost = cost_of(op, dropout=0.5)
    assert launches == []
    assert list(cost.seconds) == [OURS, BARE]
    for candidate, spans in cost.seconds.items():
        assert [len(readings) for readings in spans.values()] == [2, 2]
        assert 0 < cost.median(candidate, "forward") < cost.median(candidate, "forward_backward")


@pytest.mark.kernels
def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "op", "softmax", "--overhead", "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert "softmax of 2x4x64 float32, launches stubbed" in out
    assert "us / bare us" in out


@pytest.mark.skipif(why_no_kernels(DEVICE) is None, reason="kernels run here")
def test_without_kernels_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "op", "softmax", "--overhead", "--device", "cpu"]) == 2
    assert "--overhead needs an op's kernels: Triton has no compiler for cpu" in capsys.readouterr().err
