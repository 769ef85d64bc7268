import math

import pytest

from benchmarks.lint_kernels.cases import CASES, Case, launches_of
from benchmarks.lint_kernels.command import lint, main
from benchmarks.lint_kernels.compile import CHIPS, compiler, resident
from benchmarks.lint_kernels.figures import faults, read_figures
from tests.benchmarks.lint_kernels.kernels import GOOD, NARROW, SLOW, SPILLING, compiles


@compiles
@pytest.mark.parametrize("op", ["dropout", "rms_norm"])  # elementwise with a mask, and sums of rows
def test_kernels_have_no_faults(op: str) -> None:
    rows = list(lint([case for case in CASES if case.daily and case.op == op], archs=["sm_90"]))
    assert len(rows) >= 2
    assert faults(rows, read_figures(), compiler=compiler()) == []


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_no_persistent_program_waits_for_another_to_end(arch: str) -> None:
    persistent = 0
    for case in CASES:
        for launch in launches_of(case, arch):
            # Persistent kernels loop over tiles, num_programs apart. Without sums each tile has its own program.
            arguments = dict(zip(launch.function.arg_names, launch.arguments, strict=False))
            if "num_programs" in launch.function.src and arguments.get("partial_ptr", True) is not None:
                persistent += 1
                limit = CHIPS[arch].processors * resident(launch, arch)
                assert math.prod(launch.grid) <= limit, (case.title, launch.function)
    assert persistent >= 5


@compiles
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_kernel_of_any_case_has_a_fault() -> None:
    assert faults(lint(CASES, archs=tuple(CHIPS)), read_figures(), compiler=compiler()) == []


@compiles
@pytest.mark.parametrize(
    ("case", "arch", "fault"),
    [
        (GOOD, "sm_90", None),
        (GOOD, "gfx942", None),
        (SPILLING, "sm_90", "instructions move registers to memory or back"),
        (NARROW, "sm_90", "accesses of less than 128 bits to tensors"),
        (NARROW, "gfx942", "accesses of less than 128 bits to tensors"),
        (SLOW, "sm_90", "instructions per element, the budget is 27.6"),
    ],
    ids=lambda value: value.op if isinstance(value, Case) else None,
)
def test_a_bad_kernel_is_found_out(case: Case, arch: str, fault: str | None) -> None:
    figures = {"compiler": "another", "accepted": [], "kernels": {}}
    lines = faults(lint([case], archs=[arch]), figures, compiler=compiler())
    if fault is None:
        assert lines == []
    else:
        assert len(lines) == 1
        assert fault in lines[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--arch", "sm_91"], "no architecture 'sm_91'; did you mean 'sm_90'? there are: gfx942, sm_100, sm_80, sm_90"),
        (
            ["--op", "rottary"],
            "no op with kernels 'rottary'; did you mean 'rotary'? there are: ",
        ),
        (["--write", "--op", "dropout"], "--write renews all figures; leave --arch and --op out"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main([*arguments]) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.lint_kernels: {text}")
