import pytest
import torch

from fuselayers.cli.train.memory import peak_memory
from tests.processes import run

_PROGRAM = """
import torch
from fuselayers.cli.train.memory import peak_memory
print(peak_memory(torch.device("cpu")))
held = b"x" * 300_000_000
print(peak_memory(torch.device("cpu")))
del held
print(peak_memory(torch.device("cpu")))
"""


def test_the_peak_grows_with_what_is_held_and_stays() -> None:
    before, held, after = map(int, run(_PROGRAM).printed.split())
    assert 250_000_000 < held - before < 350_000_000
    assert held <= after < held + 10_000_000


def test_a_gpus_peak_is_that_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + device.index)
    assert peak_memory(torch.device("cuda", 3)) == 1003
