import io

from rich.console import Console

from fuselayers.cli.text import print_table

_ROWS = [
    {"op": "softmax", "dtype": "float32", "fwd ms": "1.25", "both ms": "10.50"},
    {"op": "rms_norm", "dtype": "float16", "fwd ms": "0.75", "both ms": ""},
]


def test_columns() -> None:
    file = io.StringIO()
    print_table(Console(file=file, width=20), _ROWS, left=2, title="times")
    assert file.getvalue().splitlines() == [
        "times",
        "op        dtype    fwd ms  both ms",
        "softmax   float32    1.25    10.50",
        "rms_norm  float16    0.75",
    ]
