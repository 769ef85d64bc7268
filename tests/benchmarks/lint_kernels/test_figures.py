from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lint_kernels.assembly import Code
from benchmarks.lint_kernels.cases import CASES, Case, launches_of
from benchmarks.lint_kernels.figures import (
    BUDGET,
    Accepted,
    Expected,
    Figures,
    Row,
    expected_of,
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
    resident=9,
    in_flight=82944,
    seconds=32.2e-6,
    share=0.97,
)
EXPECTED = Expected(ROW.case, ROW.arch, kernels=(1, 2), seconds=(32e-6, 64e-6), shares=(0.97, 0.95))
PLACE = "dropout 4096 bfloat16, dropout.dropout, sm_90"
FIGURES = Figures(
    *("Triton 1", (), {ROW.case: {ROW.kernel: {ROW.arch: [20.0, 2, 0]}}}), {ROW.case: {ROW.arch: [1, 2, 0.97, 0.95]}}
)


def _case(title: str) -> Case:
    return next(case for case in CASES if case.title == title)


@compiles
def test_what_stands_outside_of_loops_counts_once_for_a_program() -> None:
    case = _case("bias_activation_dropout gelu 4096 bfloat16")
    backward = launches_of(case)[1]
    # Programs go through 4096 x 2 tiles of 2 x 2048; a thread has 32 elements of a tile.
    num_programs = backward.grid[0]
    code = Code(100, 0, once=Counter({"MOV": 320}), looped=Counter({"FMUL": 640, "LDG.E.128": 64}), loading_loops=1)
    row = measure(case, backward, "sm_90", code, 512)
    assert row.instructions == pytest.approx((704 + 320 / (4096 / num_programs)) / 32, abs=0.06)
    assert row.moved == pytest.approx(3 * 2 + num_programs * 4 / 8192, abs=0.06)
    # 104 registers of 128 threads: 4 programs on each processor, each with 64 loads of 16 bytes a thread.
    assert (row.resident, row.in_flight) == (4, 4 * 128 * 64 * 16)
    assert row.budget == pytest.approx(BUDGET * row.moved, abs=0.4)
    assert (row.registers, row.shared, row.loads, row.stores) == (100, 512, "64x128", "")
    assert row.kernel == "bias_activation_dropout.backward"


@compiles
@pytest.mark.parametrize(("narrow", "beyond"), [(2, 0), (3, 1), (16, 14)])
def test_a_seed_may_be_read_in_less_than_128_bits(narrow: int, beyond: int) -> None:
    case = _case("dropout 4096 bfloat16")
    code = Code(55, 0, once=Counter({"LDG.E.128": 4, "STG.E.128": 4, "LDG.E.64": narrow}), looped=Counter())
    row = measure(case, launches_of(case)[0], "sm_90", code, 0)
    assert row.narrow - row.scalars == beyond


@pytest.mark.parametrize(
    ("row", "found"),
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
def test_faults(row: Row, found: list[str]) -> None:
    assert faults([row], FIGURES, compiler="Triton 1") == [f"{PLACE}: {text}" for text in found]


def test_a_kernel_without_a_figure_is_a_fault() -> None:
    found = faults([replace(ROW, arch="sm_80")], FIGURES, compiler="Triton 1")
    assert found == [f"{PLACE[:-5]}sm_80: no figure to compare with; run benchmarks.lint_kernels --write"]


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


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (EXPECTED, []),
        (replace(EXPECTED, shares=(0.96, 0.94)), []),
        (replace(EXPECTED, shares=None), []),
        (replace(EXPECTED, shares=(0.97, 0.92)), ["expected at 97% and 92%, before 97% and 95%"]),
        (replace(EXPECTED, kernels=(1, 3)), ["4 kernels, before 3"]),
        (
            replace(EXPECTED, shares=(0.89, 0.95)),
            [
                "expected at 89% and 95% of a copy's rate, the goals are 90 % and 80 %",
                "expected at 89% and 95%, before 97% and 95%",
            ],
        ),
        # Too small to reach a goal.
        (
            replace(EXPECTED, seconds=(8e-6, 16e-6), shares=(0.96, 0.70)),
            ["expected at 96% and 70%, before 97% and 95%"],
        ),
    ],
)
def test_faults_of_expected_shares(expected: Expected, found: list[str]) -> None:
    place = f"{ROW.case}, {ROW.arch}"
    assert faults([], FIGURES, compiler="Triton 1", expected=[expected]) == [f"{place}: {text}" for text in found]
    goals = faults([], FIGURES, compiler="Triton 2", expected=[expected])
    assert goals == [f"{place}: {text}" for text in found if "goals" in text]
    accepted = (Accepted(ROW.case, "all", "share", "a reason"),)
    assert faults([], replace(FIGURES, accepted=accepted), compiler="Triton 2", expected=[expected]) == []


def test_a_case_without_an_expected_share_is_a_fault() -> None:
    found = faults([], replace(FIGURES, expected={}), compiler="Triton 1", expected=[EXPECTED])
    assert found == [f"{ROW.case}, {ROW.arch}: no expected share to compare with; run benchmarks.lint_kernels --write"]


@compiles
def test_torchs_own_kernels_count_too() -> None:
    expected = expected_of(_case("residual_rms_norm 4096 bfloat16"), "sm_90")
    assert expected.kernels == (1, 2)  # backward: the rows, and the sums of the programs
    assert expected.seconds[0] < expected.seconds[1] < 1e-3
    assert expected.shares is not None
    assert 0.8 < expected.shares[1] < expected.shares[0] < 1


def test_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    spills, budget = (Accepted(ROW.case, ROW.kernel, fault, "a reason") for fault in ("spills", "budget"))
    rows = [
        replace(ROW, spills=4),
        replace(ROW, spills=3, instructions=19.0),  # the same kernel in backward
        replace(ROW, arch="sm_80", instructions=22.5, narrow=0),
        replace(ROW, kernel="other"),
    ]
    write_figures(rows, [EXPECTED], replace(FIGURES, accepted=(spills, budget)), compiler="Triton 2", path=path)
    after = read_figures(path)
    assert after.compiler == "Triton 2"
    assert after.accepted == (spills,)  # the other fault is gone
    assert after.kernels == {
        ROW.case: {ROW.kernel: {"sm_90": [20.0, 2, 4], "sm_80": [22.5, 0, 0]}, "other": {"sm_90": [20.0, 2, 0]}}
    }
    assert after.expected == {ROW.case: {ROW.arch: [1, 2, 0.97, 0.95]}}
    assert faults(rows, after, compiler="Triton 2", expected=[EXPECTED]) == []
    # One line for each kernel, for the sake of diffs.
    assert '      "dropout.dropout": {"sm_90": [20.0, 2, 4], "sm_80": [22.5, 0, 0]},' in path.read_text().splitlines()


def test_the_file_holds_figures_of_today_s_cases_alone() -> None:
    figures = read_figures()
    titles = {case.title for case in CASES}
    assert set(figures.kernels) == titles
    assert set(figures.expected) == {case.title for case in CASES if case.floor is not None}
    assert {one.case for one in figures.accepted} <= titles
    assert all(len(one.reason) > 20 for one in figures.accepted)
