import json
import math
import re
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fuselayers.partition import auto_file, fuse, timings, warm_up
from fuselayers.partition.cache import locked
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
    ("text", "problem"),
    [
        ('{"my machine": {"one": {"eager": 1.0,}}}', "Expecting property name"),
        ("", "Expecting value"),
        ("[1]", "it holds a list, not an object"),
        ("[" * 100_000, "recursion"),
        ('{"a": ' + "1" * 5000 + "}", "integer string conversion"),
    ],
    ids=["a comma", "nothing", "a list", "a deep nest", "many digits"],
)
def test_a_file_that_cannot_be_read_is_not_used_and_replaced(text: str, problem: str) -> None:
    auto_file().write_text(text)
    told = (
        rf"is no file as fuselayers writes it \(.*{problem}.*\); it is not used, and the next measurement replaces it$"
    )
    with pytest.warns(UserWarning, match=told):
        assert remembered("one") is None
    with pytest.warns(UserWarning, match=told):
        remember("one", {"eager": 2.0})
    assert remembered("one") == {"eager": 2.0}


@pytest.mark.parametrize(
    "seconds",
    [
        {"eager": math.nan},
        {"eager": -1.0},
        {"eager": math.inf},
        {"eager": 10**400},
        {"eager": True},
        {"eager": "fast"},
        {"eager": None, "plain": None},
        {},
        [1.0],
        None,
    ],
    ids=str,
)
def test_times_that_are_no_finite_seconds_are_dropped_and_the_others_stay(seconds: object) -> None:
    remember("one", {"eager": 1.0, "inductor": None})
    (machine,) = content = json.loads(auto_file().read_text())
    content[machine]["two"] = seconds
    content["other machine"] = seconds
    auto_file().write_text(json.dumps(content))
    told = r"holds entries that fuselayers does not write, such as '(two|other machine|eager|plain)'; they are not used"
    with pytest.warns(UserWarning, match=told):
        assert remembered("two") is None
    with pytest.warns(UserWarning, match=told):
        assert remembered("one") == {"eager": 1.0, "inductor": None}
    with pytest.warns(UserWarning, match=told):
        remember("two", {"eager": 2.0})
    assert (remembered("one"), remembered("two")) == ({"eager": 1.0, "inductor": None}, {"eager": 2.0})


def test_a_function_runs_whatever_times_are_stored() -> None:
    """They ended the compilation with StopIteration or OverflowError."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with warm_up(0):
        fuse(double)(torch.ones(4))
    written = auto_file().read_text()
    for wrong in ("NaN", "-1.0", "null", "1" + "0" * 400):
        auto_file().write_text(re.sub(r": [0-9][-.e0-9]*", f": {wrong}", written))
        torch.compiler.reset()
        with pytest.warns(UserWarning, match="that fuselayers does not write, such as 'double"), warm_up(0):
            assert fuse(double)(torch.ones(4)).tolist() == [2.0] * 4


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
from fuselayers.partition.timings import remember, remembered
me, other = sys.argv[1:]
open(me, "w").close()
while not os.path.exists(other):
    pass
for number in range(40):
    while remembered(f"{me} {number}") is None:  # nobody waits for the lock: what meets another writer is not stored
        remember(f"{me} {number}", {"eager": 1.0})
"""


def test_processes_that_write_at_once_lose_nothing_that_was_stored(tmp_path: Path) -> None:
    writers = [Program(WRITER, *names, folder=tmp_path) for names in (("one", "other"), ("other", "one"))]
    for writer in writers:
        assert writer.wait().errors == ""
    (known,) = json.loads(auto_file().read_text()).values()
    assert len(known) == 80


def test_tune_keeps_its_measurements_while_another_process_holds_the_lock_for_a_moment() -> None:
    with ExitStack() as held:
        held.enter_context(locked(auto_file()))
        release = Timer(0.2, held.close)
        release.start()
        with measured_anew(keep=True):
            remember("one", {"eager": 1.0})
        release.join()
    assert remembered("one") == {"eager": 1.0}


def test_a_lock_that_stays_held_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fuselayers")
    with locked(auto_file()):
        remember("one", {"eager": 1.0})
        text = r"auto\.lock is locked by another process; run it again later"
        with pytest.raises(BlockingIOError, match=text), measured_anew(keep=True):
            remember("one", {"eager": 1.0})
    assert "the times are not stored for later processes" in caplog.text
    assert remembered("one") is None
    remember("one", {"eager": 1.0})
    assert remembered("one") == {"eager": 1.0}


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
