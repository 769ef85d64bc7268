from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lint_kernels.assembly import Code
from benchmarks.lint_kernels.cases import CASES, Case, launches_of
from benchmarks.lint_kernels.figures import (
    BUDGET,
    Accepted,
    Figures,
    Row,
    faults,
    measure,
    read_figures,
    write_figures,
)
from tests.benchmarks.lint_kernels.kernels import compiles

ROW = Row(
    case="dropout 4096 bfloat16",
    kernel="dropout.dropout",
    arch="sm_90",
    registers=55,
    spills=0,
    shared=0,
    loads="4x128",
    stores="4x128",
    narrow=2,
    scalars=2,
    instructions=20.0,
    moved=4.0,
    budget=27.6,
)
PLACE = "dropout 4096 bfloat16, dropout.dropout, sm_90"
FIGURES = Figures("Triton 1", (), {ROW.case: {ROW.kernel: {ROW.arch: [20.0, 2, 0]}}})


def _case(title: str) -> Case:
    return next(case for case in CASES if case.title == title)


@compiles
def test_what_stands_outside_of_loops_counts_once_for_a_program() -> None:
    case = _case("bias_activation_dropout gelu 4096 bfloat16")
    backward = launches_of(case)[1]
    # Programs go through 4096 x 2 tiles of 2 x 2048; a thread has 32 elements of a tile.
    num_programs = backward.grid[0]
    code = Code(100, 0, once=Counter({"MOV": 320}), looped=Counter({"FMUL": 640, "LDG.E.128": 64}))
    row = measure(case, backward, "sm_90", code, shared=512, threads=128)
    assert row.instructions == pytest.approx((704 + 320 / (4096 / num_programs)) / 32, abs=0.06)
    assert row.moved == pytest.approx(3 * 2 + num_programs * 4 / 8192, abs=0.06)
    assert row.budget == pytest.approx(BUDGET * row.moved, abs=0.4)
    assert (row.registers, row.shared, row.loads, row.stores) == (100, 512, "64x128", "")
    assert row.kernel == "bias_activation_dropout.backward"


@compiles
@pytest.mark.parametrize(("narrow", "beyond"), [(2, 0), (3, 1), (16, 14)])
def test_a_seed_may_be_read_in_less_than_128_bits(narrow: int, beyond: int) -> None:
    case = _case("dropout 4096 bfloat16")
    code = Code(55, 0, once=Counter({"LDG.E.128": 4, "STG.E.128": 4, "LDG.E.64": narrow}), looped=Counter())
    launch = launches_of(case)[0]
    row = measure(case, launch, "sm_90", code, shared=0, threads=32 * launch.num_warps)
    assert row.narrow - row.scalars == beyond


@pytest.mark.parametrize(
    ("row", "lines"),
    [
        (ROW, []),
        (replace(ROW, instructions=21.0), []),
        (replace(ROW, instructions=21.1), ["21.1 instructions per element, before 20"]),
        (replace(ROW, spills=3), ["3 instructions move registers to memory or back", "3 spills, before 0"]),
        (replace(ROW, narrow=1), []),
        (replace(ROW, narrow=3, scalars=4), ["3 accesses of less than 128 bits in all, before 2"]),
        (replace(ROW, scalars=1), ["1 accesses of less than 128 bits to tensors"]),
        (replace(ROW, budget=19.9), ["20.0 instructions per element, the budget is 19.9"]),
        (replace(ROW, budget=None), []),
    ],
)
def test_faults(row: Row, lines: list[str]) -> None:
    assert faults([row], FIGURES, compiler="Triton 1") == [f"{PLACE}: {text}" for text in lines]


def test_a_kernel_without_a_figure_is_a_fault() -> None:
    lines = faults([replace(ROW, arch="sm_80")], FIGURES, compiler="Triton 1")
    assert lines == [f"{PLACE[:-5]}sm_80: no figure to compare with; run benchmarks.lint_kernels --write"]


def test_figures_of_another_compiler_are_not_compared() -> None:
    assert faults([replace(ROW, instructions=25.0, narrow=9, scalars=9)], FIGURES, compiler="Triton 2") == []
    assert faults([replace(ROW, arch="sm_80")], FIGURES, compiler="Triton 2") == []
    assert len(faults([replace(ROW, instructions=28.0, spills=1)], FIGURES, compiler="Triton 2")) == 2


def test_an_accepted_fault_must_not_grow() -> None:
    accepted = (Accepted(ROW.case, ROW.kernel, "spills", "a reason"),)
    figures = Figures("Triton 1", accepted, {ROW.case: {ROW.kernel: {ROW.arch: [20.0, 2, 3]}}})
    assert faults([replace(ROW, spills=3)], figures, compiler="Triton 1") == []
    assert faults([replace(ROW, spills=4)], figures, compiler="Triton 1") == [f"{PLACE}: 4 spills, before 3"]
    assert faults([replace(ROW, spills=4)], figures, compiler="Triton 2") == []


def test_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    spills, budget = (Accepted(ROW.case, ROW.kernel, fault, "a reason") for fault in ("spills", "budget"))
    rows = [
        replace(ROW, spills=4),
        replace(ROW, spills=3, instructions=19.0),  # the same kernel in backward
        replace(ROW, arch="sm_80", instructions=22.5, narrow=0),
        replace(ROW, kernel="other"),
    ]
    write_figures(rows, replace(FIGURES, accepted=(spills, budget)), compiler="Triton 2", path=path)
    after = read_figures(path)
    assert after.compiler == "Triton 2"
    assert after.accepted == (spills,)  # the other fault is gone
    assert after.kernels == {
        ROW.case: {ROW.kernel: {"sm_90": [20.0, 2, 4], "sm_80": [22.5, 0, 0]}, "other": {"sm_90": [20.0, 2, 0]}}
    }
    assert faults(rows, after, compiler="Triton 2") == []
    # One line for each kernel, for the sake of diffs.
    assert '      "dropout.dropout": {"sm_90": [20.0, 2, 4], "sm_80": [22.5, 0, 0]},' in path.read_text().splitlines()


def test_the_file_holds_figures_of_today_s_cases_alone() -> None:
    figures = read_figures()
    titles = {case.title for case in CASES}
    assert set(figures.kernels) == titles
    assert {fault.case for fault in figures.accepted} <= titles
    assert all(len(fault.reason) > 20 for fault in figures.accepted)
