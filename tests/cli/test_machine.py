import platform

import pytest
import torch

from fuselayers.cli.machine import choose_device
from tests.processes import run


def test_auto_is_a_gpu_where_torch_can_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", setting="--device") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto", setting="--device") == torch.device("cuda")


@pytest.mark.parametrize("name", ["toaster", "cuda:99", "", "meta"])
def test_a_device_that_cannot_be_used_is_refused(name: str) -> None:
    text = f"^--device must be auto, cpu or a GPU that torch can use, got '{name}'; here there are: auto, cpu"
    with pytest.raises(ValueError, match=text):
        choose_device(name, setting="--device")


_PAGE_FAULTS = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which there would be few faults
ctypes.CDLL(None).mallopt(-2, 0)  # glibc keeps nothing of its own accord, and does not learn to
from fuselayers.cli.machine import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(40):  # until the holes in the heap fit
    torch.ones(1 << 23)  # more than glibc keeps by itself
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(1 << 23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is of glibc")
def test_freed_memory_is_kept() -> None:
    # In new processes, since the setting lasts to the end of a process.
    given_back, kept = (run(_PAGE_FAULTS, how) for how in ("given back", "kept"))
    assert given_back.errors == kept.errors == ""
    assert int(kept.printed) < int(given_back.printed) / 10
