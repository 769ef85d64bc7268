import pytest

from fuselayers.testing import Cell, Report

CELLS = [
    Cell("values", "float32", "pass"),
    Cell("values", "bfloat16", "fail", "y0: error 1, allowed 0"),
    Cell("second derivative", "float32", "pass", "raises RuntimeError: no"),
    Cell("second derivative", "bfloat16", "pass", "raises RuntimeError: no"),
    Cell("CUDA graph", "float32", "n/a", "needs a GPU"),
    Cell("CUDA graph", "bfloat16", "n/a", "needs a GPU"),
]


def test_it_prints_a_table_and_the_reasons() -> None:
    assert str(Report("my_norm", CELLS)).splitlines() == [
        "my_norm: 1 of 6 checks failed, 2 n/a",
        "",
        "                   float32   bfloat16",
        "values             pass      FAIL",
        "second derivative  pass      pass",
        "CUDA graph         n/a       n/a",
        "",
        "FAIL  values (bfloat16): y0: error 1, allowed 0",
        "n/a   CUDA graph (float32, bfloat16): needs a GPU",
        "pass  second derivative (float32, bfloat16): raises RuntimeError: no",
    ]


def test_it_raises_where_something_failed() -> None:
    report = Report("my_norm", CELLS)
    assert [(cell.check, cell.dtype) for cell in report.failures] == [("values", "bfloat16")]
    with pytest.raises(AssertionError, match=r"^my_norm: 1 of 6 checks failed, 2 n/a\n"):
        report.raise_on_failure()
    Report("my_norm", CELLS[:1]).raise_on_failure()


VALUES_N_A = Cell("values and gradients", "float32", "n/a", "the reference raises NameError: no")


@pytest.mark.parametrize(
    ("cells", "counts"),
    [
        ([], "0 of 0 checks failed"),
        ([VALUES_N_A], "0 of 1 checks failed, 1 n/a"),
        ([VALUES_N_A, CELLS[0]], "0 of 2 checks failed, 1 n/a"),
        (CELLS[4:], "0 of 2 checks failed, 2 n/a"),
    ],
)
def test_it_raises_where_nothing_was_shown(cells: list[Cell], counts: str) -> None:
    with pytest.raises(AssertionError, match=f"^my_norm: {counts}; that shows nothing: no values were compared\n"):
        Report("my_norm", cells).raise_on_failure()
    Report("my_norm", [*cells, Cell("values and gradients", "float64", "pass")]).raise_on_failure()
