import io
import re

from rich.console import Console

from fuselayers.cli.train.metrics import Metrics
from fuselayers.cli.train.progress import show_progress


def test_some_twenty_lines_and_one_for_each_validation() -> None:
    output = io.StringIO()
    for step in range(11, 41):
        row = Metrics(step, 2.0 + step, 3.25 if step == 33 else None, 1e-3, 1.0, 1000.0, 1.0, 1_234_567_890)
        show_progress(Console(file=output, width=120), row, steps=40, durations=[9.0, 1.0])
    steps = [int(step) for step in re.findall(r"step (\d+)/40  loss ", output.getvalue())]
    assert steps == [12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 33, 34, 36, 38, 40]
    assert "step 33/40  loss 35.000  validation 3.250  1,000 tokens/s  1.23 GB  0:35 left" in output.getvalue()
