from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.cli.bench import suite as module
from fuselayers.cli.bench.cases import OPS, OpCase, Settings
from fuselayers.cli.bench.suite import EAGER, OURS, Suite, Variant, measure_suite, variants

CPU = torch.device("cpu")


def measure(variant: Variant, *, minutes: float = 5.0, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Suite:
    said: list[str] = []
    suite = measure_suite(
        [variant],
        shapes=[(4, 6, 64), (2, 3, 64)],
        dtypes=dtypes,
        device=CPU,
        repeats=2,
        minutes=minutes,
        say=said.append,
    )
    assert len(said) == (len(dtypes) if minutes > 0 else 0)
    return suite


def test_a_row_for_every_candidate_and_shape() -> None:
    suite = measure(Variant("dropout", "", {"dropout": 0.1}))
    assert suite.wrong == {}
    assert suite.left_out == []
    assert suite.bandwidth > 1e8
    assert [(row.shape, row.candidate) for row in suite.rows] == [
        (shape, name) for shape in ((4, 6, 64), (2, 3, 64)) for name in (EAGER, "torch.compile", OURS)
    ]
    for row in suite.rows:
        size = 4 * torch.Size(row.shape).numel()
        assert row.dtype == "float32"
        assert row.peak is None
        assert all(len(seconds) == 2 for seconds in row.seconds.values())
        assert 0 < row.median("forward") < row.median("forward_backward")
        assert row.floor == {"forward": 2 * size, "forward_backward": 4 * size}
        assert row.kept == (8 if row.candidate == OURS else size if row.candidate == EAGER else row.kept)


def test_the_floor_counts_what_backward_reads_again() -> None:
    suite = measure(Variant("bias_activation_dropout", "relu", {"activation": "relu", "dropout": 0.1}))
    rows = [row for row in suite.rows if row.candidate == OURS]
    size, bias = 4 * 4 * 6 * 64, 4 * 64
    assert rows[0].floor["forward"] == 2 * size + bias
    assert rows[0].floor["forward_backward"] - rows[0].floor["forward"] == 3 * size + bias


def test_what_there_is_no_time_for_is_named() -> None:
    suite = measure(Variant("dropout", "", {"dropout": 0.1}), minutes=-1, dtypes=(torch.float32, torch.bfloat16))
    assert suite.rows == []
    assert suite.left_out == ["dropout, float32", "dropout, bfloat16"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_wrong_numbers_are_not_timed(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout it is held against plain torch, with it against the library's formula."""
    right = ops.bias_dropout_residual

    def wrong(x: Tensor, residual: Tensor, *, p: float, backend: str = "auto", **others: Tensor) -> Tensor:
        y = right(x, residual, p=p, backend=backend, **others)
        return y * 1.01 if p == dropout and backend == "auto" else y

    def case(settings: Settings) -> OpCase:
        return replace(found(settings), op=wrong)

    found = OPS["bias_dropout_residual"]
    monkeypatch.setitem(OPS, "bias_dropout_residual", case)
    suite = measure(Variant("bias_dropout_residual", "bias", {"dropout": 0.3}))
    ((what, why),) = suite.wrong.items()
    assert what == "fuselayers: bias_dropout_residual, bias, float32"
    assert why.startswith("output 0 is off by")
    assert {row.candidate for row in suite.rows} == {EAGER, "torch.compile"}


def test_another_library_has_inputs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OPS["rms_norm"](Settings((2, 8), dropout=0.0, activation="gelu", dtype=torch.float32, device=CPU))

    def overwrites(x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        x.data.zero_()
        return y

    before = case.tensors["x"].detach().clone()
    candidate = module._candidate("Liger", case, overwrites)
    candidate.call()
    assert torch.equal(case.tensors["x"], before)
    assert [leaf.shape for leaf in candidate.leaves] == [(2, 8), (8,)]
    assert all(leaf.requires_grad for leaf in candidate.leaves)


def test_every_op_of_the_bench_is_in_the_suite() -> None:
    assert {variant.op for variant in variants()} == set(OPS) - {"activate"}
    titles = [variant.title for variant in variants()]
    assert len(set(titles)) == len(titles)
    assert "bias_activation_dropout, squared_relu, no bias" in titles
