import re

import torch
from torch import Tensor, nn

from fuselayers.partition import FusionReport, GraphReport, fuse
from tests.processes import run


def wave(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos()


SCRIPT = """
import torch
from fuselayers.partition import fuse
from tests.partition.test_report import wave
fused = fuse(wave, backend="eager", dynamic=False)
fused(torch.ones(3, 4, requires_grad=True), torch.ones(4))
print(fused.report().graphs[0].identity)
"""


def test_before_the_first_call() -> None:
    assert str(fuse(wave).report()) == "nothing is compiled yet: call the function first"
    assert fuse(wave).report() == FusionReport(())


def test_a_line_for_each_graph() -> None:
    fused = fuse(wave, backend="eager", dynamic=False)
    fused(torch.ones(3, 4, requires_grad=True), torch.ones(4))
    fused(torch.ones(2, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    first, second = str(fused.report()).splitlines()
    assert re.fullmatch(r"wave\(float32\[3, 4\], float32\[4\]\) training \[[0-9a-f]{8}\]: eager, as asked", first)
    assert re.fullmatch(r"wave\(float64\[2, 4\], float64\[4\]\) forward \[[0-9a-f]{8}\]: eager, as asked", second)


def test_measured_times_are_shown() -> None:
    report = GraphReport(
        "wave(float32[3]) training", "0a1b2c3d", "eager", "measured", {"inductor": 2e-3, "eager": 1.5e-3}
    )
    assert str(report) == "wave(float32[3]) training [0a1b2c3d]: eager, measured: inductor 2 ms, eager 1.5 ms"


def test_a_module_has_it_too_and_many_inputs_are_counted() -> None:
    fused = fuse(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), backend="eager", partition="default")
    fused(torch.ones(1, 2))
    (graph,) = fused.report().graphs
    assert re.fullmatch(r"Sequential\((float32\[[\d, ]+\], ){3}2 more\) training, default", graph.name)
    assert graph.served_by == "eager"


def test_another_process_gives_a_graph_the_same_identity() -> None:
    fused = fuse(wave, backend="eager", dynamic=False)
    fused(torch.ones(3, 4, requires_grad=True), torch.ones(4))
    done = run(SCRIPT)
    assert done.errors == ""
    assert done.printed.strip() == fused.report().graphs[0].identity


def test_what_is_not_the_same_graph_has_another_identity() -> None:
    identities = set()
    for shape, options in (
        ((3, 4), {}),
        ((4, 3), {}),
        ((3, 4), {"partition": "default"}),
        ((3, 4), {"torch_random": True}),
    ):
        fused = fuse(wave, backend="eager", dynamic=False, **options)  # type: ignore[call-overload]
        fused(torch.ones(shape), torch.ones(shape[1]))
        identities.add(fused.report().graphs[0].identity)
    assert len(identities) == 4
