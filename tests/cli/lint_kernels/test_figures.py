from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fuselayers.cli.lint_kernels.assembly import Code
from fuselayers.cli.lint_kernels.cases import CASES, Case, launches_of
from fuselayers.cli.lint_kernels.figures import (
    BUDGET,
    Accepted,
    Figures,
    Row,
    faults,
    measure,
    read_figures,
    write_figures,
)
from tests.cli.lint_kernels.kernels import compiles

ROW = Row(
    case="dropout 4096 bfloat16",
    kernel="dropout.dropout",
    arch="sm_90",
    registers=55,
    spills=0,
    shared=0,
    loads="4x128",
    stores="4x128",
    narrow=0,
    all_narrow=2,
    instructions=20.0,
    moved=4.0,
    budget=27.6,
)
PLACE = "dropout 4096 bfloat16, dropout.dropout, sm_90"
KEY = ROW.case, ROW.kernel, ROW.arch
FIGURES = Figures("Triton 1", (), {KEY: 20.0}, {KEY: 2})


def _case(title: str) -> Case:
    return next(case for case in CASES if case.title == title)


@compiles
def test_what_stands_outside_of_loops_counts_once_for_a_program() -> None:
    case = _case("bias_activation_dropout gelu 4096 bfloat16")
    backward = launches_of(case)[1]
    # 264 programs go through 8192 tiles of 2 x 2048, 31.03 each; a thread has 32 elements of a tile.
    code = Code(100, 0, once=Counter({"MOV": 320}), looped=Counter({"FMUL": 640, "LDG.E.128": 64}))
    row = measure(case, backward, "sm_90", code, 512)
    assert row.instructions == pytest.approx((704 + 320 / (8192 / 264)) / 32, abs=0.06)
    assert row.moved == pytest.approx(3 * 2 + 264 * 4 / 16384, abs=0.06)
    assert row.budget == pytest.approx(BUDGET * row.moved, abs=0.4)
    assert (row.registers, row.shared, row.loads, row.stores) == (100, 512, "64x128", "")
    assert row.kernel == "bias_activation_dropout.backward"


@compiles
@pytest.mark.parametrize(("narrow", "beyond"), [(2, 0), (3, 1), (16, 14)])
def test_a_seed_may_be_read_in_less_than_128_bits(narrow: int, beyond: int) -> None:
    case = _case("dropout 4096 bfloat16")
    code = Code(55, 0, once=Counter({"LDG.E.128": 4, "STG.E.128": 4, "LDG.E.64": narrow}), looped=Counter())
    assert measure(case, launches_of(case)[0], "sm_90", code, 0).narrow == beyond


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (ROW, None),
        (replace(ROW, instructions=21.0), None),
        (replace(ROW, instructions=21.1), "21.1 instructions per element, they were 20.0"),
        (replace(ROW, spills=3), "3 instructions move registers to memory or back"),
        (replace(ROW, narrow=8), "8 accesses of less than 128 bits to tensors"),
        (replace(ROW, all_narrow=1), None),
        (replace(ROW, all_narrow=3), "3 accesses of less than 128 bits in all, they were 2"),
        (replace(ROW, budget=19.9), "20.0 instructions per element, the budget is 19.9"),
        (replace(ROW, budget=None), None),
    ],
)
def test_what_is_a_fault(row: Row, fault: str | None) -> None:
    assert faults([row], FIGURES, compiler="Triton 1") == ([] if fault is None else [f"{PLACE}: {fault}"])


def test_a_kernel_without_a_figure_is_a_fault() -> None:
    found = faults([replace(ROW, arch="sm_80")], FIGURES, compiler="Triton 1")
    assert found == [f"{PLACE[:-5]}sm_80: no figure to compare with; run lint-kernels --write"]
    for without in (replace(FIGURES, narrow={}), replace(FIGURES, instructions={})):
        found = faults([ROW], without, compiler="Triton 1")
        assert found == [f"{PLACE}: no figure to compare with; run lint-kernels --write"]


def test_figures_of_another_compiler_are_not_compared() -> None:
    assert faults([replace(ROW, instructions=25.0, all_narrow=9)], FIGURES, compiler="Triton 2") == []
    assert faults([replace(ROW, arch="sm_80")], FIGURES, compiler="Triton 2") == []
    assert len(faults([replace(ROW, instructions=28.0, spills=1)], FIGURES, compiler="Triton 2")) == 2


def _accepting(fault: str, figure: float, arch: str = "sm_90") -> Figures:
    return replace(FIGURES, accepted=(Accepted(ROW.case, ROW.kernel, fault, "it is known", {arch: figure}),))


def test_what_is_accepted_is_held_where_it_is() -> None:
    spilling = replace(ROW, spills=3)
    assert faults([spilling], _accepting("spills", 3), compiler="Triton 1") == []
    (fault,) = faults([spilling], _accepting("spills", 2), compiler="Triton 1")
    assert fault == f"{PLACE}: 3 instructions move registers to memory or back; 2 are accepted"
    assert faults([spilling], _accepting("spills", 2), compiler="Triton 2") == []
    (fault,) = faults([ROW], _accepting("spills", 3), compiler="Triton 1")
    assert fault == f"{PLACE}: spills are accepted, and there are none; run lint-kernels --write"


def test_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    before = replace(
        FIGURES,
        accepted=(
            Accepted(ROW.case, ROW.kernel, "spills", "it is known", {"sm_80": 9, "sm_90": 9}),
            Accepted(ROW.case, ROW.kernel, "budget", "it was known", {"sm_90": 30}),
        ),
    )
    rows = [
        replace(ROW, spills=4),
        replace(ROW, spills=3, instructions=19.0),  # the same kernel in backward
        replace(ROW, arch="sm_80", instructions=22.5, all_narrow=0),
        replace(ROW, kernel="other"),
    ]
    write_figures(rows, before, compiler="Triton 2", path=path)
    after = read_figures(path)
    assert after.compiler == "Triton 2"
    # Only what is still there stays accepted, at today's figure.
    assert after.accepted == (Accepted(ROW.case, ROW.kernel, "spills", "it is known", {"sm_90": 4}),)
    assert after.instructions == {
        (ROW.case, ROW.kernel, "sm_90"): 20.0,
        (ROW.case, ROW.kernel, "sm_80"): 22.5,
        (ROW.case, "other", "sm_90"): 20.0,
    }
    assert after.narrow == {
        (ROW.case, ROW.kernel, "sm_90"): 2,
        (ROW.case, ROW.kernel, "sm_80"): 0,
        (ROW.case, "other", "sm_90"): 2,
    }
    assert faults(rows, after, compiler="Triton 2") == []
    # One line for each kernel, for the sake of diffs.
    lines = path.read_text().splitlines()
    assert '      "dropout.dropout": {"sm_90": 20.0, "sm_80": 22.5},' in lines
    assert '      "dropout.dropout": {"sm_90": 2, "sm_80": 0},' in lines


def test_the_file_holds_figures_of_today_s_cases_alone() -> None:
    figures = read_figures()
    titles = {case.title for case in CASES}
    assert {case for case, _, _ in figures.instructions} == titles
    assert {one.case for one in figures.accepted} <= titles
    assert all(len(one.reason) > 20 for one in figures.accepted)
