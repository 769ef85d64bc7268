import io

import pytest
from rich.console import Console

from fuselayers.cli.text import print_table

_ROWS = [
    {"op": "softmax", "dtype": "float32", "fwd ms": "1.25", "both ms": "10.50"},
    {"op": "rms_norm", "dtype": "float16", "fwd ms": "0.75", "both ms": ""},
]


def _printed(width: int | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if width is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(width))
    file = io.StringIO()
    print_table(Console(file=file, width=width or 20), _ROWS, left=2, title="times")
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [None, 80])
def test_columns_where_they_fit_and_in_a_pipe_always(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _printed(width, monkeypatch) == [
        "times",
        "op        dtype    fwd ms  both ms",
        "softmax   float32    1.25    10.50",
        "rms_norm  float16    0.75",
    ]


def test_a_paragraph_for_each_row_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _printed(24, monkeypatch) == [
        "times",
        "softmax  float32",
        "  fwd ms 1.25,",
        "  both ms 10.50",
        "rms_norm  float16",
        "  fwd ms 0.75",
    ]
