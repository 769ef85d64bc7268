import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fuselayers.partition import auto_file, timings, warm_up
from fuselayers.partition.timings import has_choice, may_measure, measured_anew, remember, remembered
from tests.processes import Program


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))


def test_what_is_remembered_is_found_again_on_the_same_machine() -> None:
    remember("one", {"eager": 1.0, "inductor": 0.5})
    remember("two", {"eager": 2.0})
    assert remembered("one") == {"eager": 1.0, "inductor": 0.5}
    assert remembered("three") is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert remembered("one") is None
    finally:
        torch.set_num_threads(threads)


def test_the_file_says_what_it_was_measured_on() -> None:
    remember("one", {"eager": 1.0})
    (machine,) = json.loads(auto_file().read_text())
    told = rf"{torch.get_num_threads()} threads, \S.*, torch {re.escape(torch.__version__)}, fuselayers \w{{12}}$"
    assert re.search(told, machine)


def test_times_of_other_sources_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    remember("one", {"eager": 1.0})
    monkeypatch.setattr(timings, "sources_hash", lambda: "0" * 64)
    assert remembered("one") is None


def test_warm_up_decides_whether_there_is_a_choice() -> None:
    with warm_up(0):
        assert has_choice()
        assert may_measure()
        torch.use_deterministic_algorithms(True)
        try:
            assert not has_choice()
        finally:
            torch.use_deterministic_algorithms(False)
    with warm_up(math.inf):
        assert not has_choice()


def test_nothing_is_measured_while_somebody_watches() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(may_measure())
        return x

    x = torch.ones(2, requires_grad=True)
    with warm_up(0):
        with FlopCounterMode(display=False):
            look(x)
        checkpoint(look, x, use_reentrant=False)
        torch.func.vmap(look)(x)
        torch.func.grad(lambda x: look(x).sum())(x)
    assert seen == [False] * 4


def test_there_is_no_choice_between_the_ranks_of_a_distributed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with warm_up(0):
        assert has_choice()
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert not has_choice()
        assert not may_measure()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"my machine": {"one": {"eager": 1.0,}}}', "JSONDecodeError"),
        ("", "JSONDecodeError"),
        ("[1]", "AttributeError"),
        ('{"my machine": {"one": {"eager": "fast"}}}', "TypeError"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_used_and_replaced(text: str, error: str) -> None:
    auto_file().write_text(text)
    told = rf"does not hold times as fuselayers writes them \({error}: .*\); it is not used, and the next measurement"
    with pytest.warns(UserWarning, match=told):
        assert remembered("one") is None
    with pytest.warns(UserWarning, match=told):
        remember("one", {"eager": 2.0})
    assert remembered("one") == {"eager": 2.0}


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_warm_up_is_checked(seconds: float) -> None:
    text = rf"^warm_up must be a number of seconds from 0 on, got {seconds}$"
    with pytest.raises(ValueError, match=text), warm_up(seconds):
        pass


def test_a_candidate_that_does_not_work_is_remembered_as_such() -> None:
    remember("one", {"eager": 1.0, "inductor": None})
    assert json.loads(auto_file().read_text()).popitem()[1]["one"] == {"eager": 1.0, "inductor": None}
    assert remembered("one") == {"eager": 1.0, "inductor": None}


WRITER = """
import os, sys
from fuselayers.partition.timings import remember
me, other = sys.argv[1:]
open(me, "w").close()
while not os.path.exists(other):
    pass
for number in range(40):
    remember(f"{me} {number}", {"eager": 1.0})
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [Program(WRITER, *names, folder=tmp_path) for names in (("one", "other"), ("other", "one"))]
    for writer in writers:
        assert writer.wait().errors == ""
    (known,) = json.loads(auto_file().read_text()).values()
    assert len(known) == 80


@pytest.mark.parametrize("keep", [True, False])
def test_measured_anew(keep: bool) -> None:
    remember("one", {"eager": 1.0})
    remember("two", {"eager": 2.0})
    with measured_anew(keep=keep) as found:
        assert remembered("one") is None
        remember("one", {"eager": 3.0})
        assert remembered("one") == {"eager": 3.0} == found["one"]
    assert remembered("one") == {"eager": 3.0 if keep else 1.0}
    assert remembered("two") == {"eager": 2.0}


def test_what_cannot_be_kept_is_said_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="below"), measured_anew(keep=True):
        remember("one", {"eager": 1.0})
