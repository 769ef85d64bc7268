from tests.processes import run

PROGRAM = """
import time
import torch
from fuselayers import fuse
from fuselayers.partition import min_cut

def slow(*arguments, **options):
    time.sleep(3.5)
    return min_cut(*arguments, **options)

fused = fuse(lambda x: x.sin().cos(), backend="eager", partition=slow)
for size in (3, 5):
    fused(torch.ones(size, requires_grad=True))
fuse(lambda x: x.sin().cos(), backend="eager")(torch.ones(3, requires_grad=True))
"""


def test_each_compilation_of_three_seconds_says_what_it_does() -> None:
    lines = [line for line in run(PROGRAM).errors.splitlines() if "compiles a graph" in line]
    assert len(lines) == 2
    assert lines[0].startswith("eager compiles a graph of ")
    assert lines[0].endswith("fusion=off in a config, level='layers' in swap, or no fuse, avoids it")
