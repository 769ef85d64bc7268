from dataclasses import replace

import pytest

from benchmarks.lint_kernels.cases import CASES
from benchmarks.lint_kernels.figures import Row, faults, read_figures

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
    budget=27.6,
)
PLACE = "dropout 4096 bfloat16, dropout.dropout, sm_90"
KERNELS = {ROW.case: {ROW.kernel: {ROW.arch: [20.0, 2, 0]}}}
FIGURES = {"compiler": "Triton 1", "accepted": [], "kernels": KERNELS}


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


def test_figures_of_another_compiler_are_not_compared() -> None:
    assert faults([replace(ROW, instructions=25.0, narrow=9, scalars=9)], FIGURES, compiler="Triton 2") == []
    assert faults([replace(ROW, arch="sm_80")], FIGURES, compiler="Triton 2") == []
    assert len(faults([replace(ROW, instructions=28.0, spills=1)], FIGURES, compiler="Triton 2")) == 2


def test_the_file_holds_figures_of_today_s_cases_alone() -> None:
    figures = read_figures()
    titles = {case.title for case in CASES}
    assert set(figures["kernels"]) == titles
    assert {fault["case"] for fault in figures["accepted"]} <= titles
    assert all(len(fault["reason"]) > 20 for fault in figures["accepted"])
