from tests.processes import run

PROGRAM = """
import time
import torch
from fuselayers import fuse
from fuselayers.partition import min_cut

def slow(*arguments, **options):
    time.sleep(3.5)
    return min_cut(*arguments, **options)

for power in (2, 3):
    x = torch.ones(3, requires_grad=True)
    fuse(lambda x: (x * power).sin().cos(), backend="eager", partition=slow if power < 3 else "min_cut")(x)
"""


def test_a_compilation_of_three_seconds_says_what_it_does_once() -> None:
    lines = [line for line in run(PROGRAM).errors.splitlines() if "compiles a graph" in line]
    assert len(lines) == 1
    assert lines[0].startswith("eager compiles a graph of ")
    assert lines[0].endswith("fusion=off in a config, level='layers' in swap, or no fuse, avoids it")
