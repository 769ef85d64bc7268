from typing import Any

import pytest
import torch

from fuselayers.cli.bench import calls as module
from fuselayers.cli.bench.calls import BARE, CallCost, call_cost
from fuselayers.cli.bench.cases import OpCase, Settings, op_case
from fuselayers.cli.bench.measure import EAGER, OURS, Candidate
from fuselayers.cli.bench.subjects import op_candidate
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.testing.meter import metered
from tests.ops.contract import DEVICE

pytestmark = pytest.mark.kernels


def case_of(op: str, **options: Any) -> OpCase:
    settings = {"shape": (2, 3, 64), "dropout": 0.0, "activation": "gelu", "dtype": torch.float32, "device": DEVICE}
    return op_case(op, Settings(**{**settings, **options}))


def cost_of(case: OpCase) -> CallCost | None:
    return call_cost("the op", case, readings=2, device=DEVICE)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_candidate_is_timed(dropout: float) -> None:
    cost = cost_of(case_of("bias_activation_dropout", dropout=dropout))
    assert cost is not None
    assert cost.title == "the op"
    assert list(cost.seconds) == [EAGER, OURS, BARE]
    for candidate, spans in cost.seconds.items():
        assert [len(readings) for readings in spans.values()] == [2, 2]
        assert 0 < cost.median(candidate, "forward") < cost.median(candidate, "forward_backward")


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter alone counts launches")
@pytest.mark.parametrize("op", ["bias_activation_dropout", "residual_layer_norm", "softmax", "rotary"])
def test_the_bare_one_launches_the_same_kernels_and_makes_the_same_tensors(op: str) -> None:
    case = case_of(op)

    def with_kernels(*tensors: Any, **named: Any) -> Any:
        return case.op(*tensors, **named, **case.options, backend="triton")

    own = op_candidate(OURS, OpCase(with_kernels, case.plain, case.tensors, {}), with_kernels)
    bare = module._bare(own)
    assert bare is not None

    def kernels(candidate: Candidate) -> tuple[list[str], list[str]]:
        with metered() as forward:
            candidate.call()
        with metered() as both:
            module._with_backward(candidate)()
        return [one.kernel for one in forward], [one.kernel for one in both]

    assert kernels(bare) == kernels(own)
    assert len(kernels(own)[1]) >= 3  # a forward for the weights, and a forward with a backward
    assert all(map(torch.equal, bare.call(), own.call()))


def test_an_op_that_torch_computes_has_none() -> None:
    assert cost_of(case_of("linear_activation")) is None
