import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.cli.bench import suite as module
from fuselayers.cli.bench.ahead import compile_ahead
from fuselayers.cli.bench.cases import OPS, OpCase, Settings, dtype_name
from fuselayers.cli.bench.measure import EAGER, OURS
from fuselayers.cli.bench.suite import Round, Suite, Variant, measure_suite

CPU = torch.device("cpu")


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate runs op by op; that compiled ones can be measured is tested with the command."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def measure(variant: Variant, *, minutes: float = 5.0, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Suite:
    said: list[str] = []
    kept: list[int] = []
    suite = measure_suite(
        [variant],
        rounds=[Round(dtype, ((4, 6, 64), (2, 3, 64)), any_size=False) for dtype in dtypes],
        device=CPU,
        repeats=2,
        deadline=time.monotonic() + 60 * minutes,
        say=said.append,
        keep=lambda suite: kept.append(len(suite.rows)),
    )
    assert len(said) == len(kept) == (len(dtypes) if minutes > 0 else 0)
    return suite


@pytest.mark.usefixtures("nothing_compiled")
def test_a_row_for_every_candidate_and_shape() -> None:
    suite = measure(Variant("dropout", "", {"dropout": 0.1}))
    assert suite.failed == {}
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


def test_what_there_is_no_time_for_is_named() -> None:
    suite = measure(Variant("dropout", "", {"dropout": 0.1}), minutes=-1, dtypes=(torch.float32, torch.bfloat16))
    assert suite.rows == []
    shapes = ("4x6x64", "2x3x64")
    assert suite.left_out == [f"dropout, {dtype}, {shape}" for dtype in ("float32", "bfloat16") for shape in shapes]


@pytest.mark.usefixtures("nothing_compiled")
def test_each_variant_is_checked_just_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped keeps what it has measured, so nothing may come first for all variants."""
    log: list[str] = []
    check, measure_one = module._check, module._measure
    monkeypatch.setattr(module, "_check", lambda variant, *rest: log.append("check") or check(variant, *rest))
    monkeypatch.setattr(module, "_measure", lambda *rest: log.append("time") or measure_one(*rest))
    measure_suite(
        [Variant("layer_norm"), Variant("rms_norm")],
        rounds=[Round(torch.float32, ((2, 3, 8),), any_size=False)],
        device=CPU,
        repeats=1,
        deadline=math.inf,
        say=lambda text: None,
        keep=lambda suite: log.append(f"keep {len(suite.rows)}"),
    )
    assert log == ["check", "time", "keep 3", "check", "time", "keep 6"]


def test_the_workers_run_what_will_be_measured() -> None:
    chosen = [Variant("layer_norm"), Variant("linear_cross_entropy")]
    rounds = [Round(dtype, ((2, 300, 8000),), any_size=True) for dtype in (torch.float32, torch.bfloat16)]
    # Such a matmul is not measured on a CPU.
    assert [(one.func, one.args) for one in module.calls_ahead(chosen, rounds, CPU)] == [
        (module._run_once, (chosen[0], one, CPU)) for one in rounds
    ]


# Not in pytest's process, where other modules come before torch: see `compile_ahead`.
COMPILED_AHEAD = """
from functools import partial

from fuselayers.cli.bench import suite
from fuselayers.cli.bench.ahead import compile_ahead


def main():
    import torch
    from torch._dynamo.utils import counters

    variant, device = suite.Variant("rms_norm"), torch.device("cpu")
    one = suite.Round(torch.float32, ((2, 3, 8),), any_size=False)
    calls = [partial(suite._run_once, given, one, device) for given in (variant, None)]
    done = compile_ahead(calls, workers=1, seconds=200.0, say=lambda line: None)
    suite._run_once(variant, one, device)
    print("done", done, "hits", counters["inductor"]["fxgraph_cache_hit"], dict(counters["inductor"]))


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing is compiled for a CPU")
def test_what_the_workers_compile_is_not_compiled_again(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(COMPILED_AHEAD)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "done 1 hits 4 {'fxgraph_cache_hit': 4}\n"


def test_workers_that_take_too_long_are_stopped_and_the_number_of_the_others_is_said() -> None:
    started, said = time.monotonic(), list[str]()
    compile_ahead([partial(time.sleep, 600)] * 2, workers=1, seconds=0.2, say=said.append)
    assert time.monotonic() - started < 60
    assert said == ["compiling, on 1 processes", "compiled 0 of 2"]


def test_torch_compile_is_compiled_for_the_tenth_variant_too() -> None:
    """Dynamo compiles a function for eight kinds of call and is eager after that, which would be timed as compiled."""
    chosen = [Variant("bias_activation_dropout", name, {"activation": name}) for name in ops.ACTIVATIONS] * 2
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs[-1] += 1
        return graph.forward

    rounds = [Round(torch.float32, ((2, 3, 8),), any_size=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=count))
        suite = measure_suite(
            chosen, rounds=rounds, device=CPU, repeats=1, deadline=math.inf, say=lambda name: graphs.append(0)
        )
    assert suite.failed == {}
    assert len(graphs) == len(chosen) > 8
    assert min(graphs) >= 1


@pytest.mark.usefixtures("nothing_compiled")
def test_an_error_of_one_candidate_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor, **options: Any) -> Tensor:
        if x.shape == (2, 3, 64):
            raise RuntimeError("out of memory\nand more")
        return ops.dropout(x, **options)

    found = OPS["dropout"]
    monkeypatch.setitem(OPS, "dropout", lambda settings: replace(found(settings), op=broken))
    suite = measure(Variant("dropout", "", {"dropout": 0.1}))
    assert suite.failed == {"fuselayers: dropout, float32, 2x3x64": "RuntimeError: out of memory"}
    assert [row.candidate for row in suite.rows] == [EAGER, "torch.compile", OURS, EAGER, "torch.compile"]


@pytest.mark.usefixtures("nothing_compiled")
def test_every_width_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for long rows may be wrong where the one for short rows is right."""

    def wrong_where_wide(x: Tensor, **options: Any) -> Tensor:
        return ops.dropout(x, **options) * (1 if x.shape[-1] == 64 else 0.9)

    found = OPS["dropout"]
    monkeypatch.setitem(OPS, "dropout", lambda settings: replace(found(settings), op=wrong_where_wide))
    for dtype in (torch.float32, torch.bfloat16):
        suite = measure_suite(
            [Variant("dropout")],
            rounds=[Round(dtype, ((2, 3, 64), (2, 3, 128)), any_size=True)],
            device=CPU,
            repeats=1,
            deadline=math.inf,
            say=lambda text: None,
        )
        ((what, why),) = suite.failed.items()
        assert what == f"fuselayers: dropout, {dtype_name(dtype)}, width 128"
        assert why.startswith("output 0 is off by")


@pytest.mark.usefixtures("nothing_compiled")
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
    ((what, why),) = suite.failed.items()
    assert what == "fuselayers: bias_dropout_residual, bias, float32, width 64"
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
    (first,) = candidate.call()
    assert candidate.restore is not None
    candidate.restore()
    (second,) = candidate.call()
    assert torch.equal(first, second)
    assert first.count_nonzero()
    assert torch.equal(case.tensors["x"], before)
    assert [leaf.shape for leaf in candidate.leaves] == [(2, 8), (8,)]
    assert all(leaf.requires_grad for leaf in candidate.leaves)
