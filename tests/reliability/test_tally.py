"""The count itself: cases that fail are counted and named, and the table adds up the parts of a test."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reliability import tally as tally_file
from tests.reliability.tally import PROPERTY, Tally, summary


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_file, "CHOSEN", "")


def _fails_below_a_half(random: random.Random) -> None:
    assert random.random() >= 0.5, "below a half"


def test_failures_are_counted_and_named() -> None:
    counted = Tally("the test", few=True)
    wanted = [seed for seed in range(8) if random.Random(seed).random() < 0.5]
    text = (
        rf"^{len(wanted)} of 8 did not hold; to repeat: RELIABILITY_CASES='{wanted[0]}' python -m pytest 'the test'\n"
    )
    with pytest.raises(AssertionError, match=text + rf"{wanted[0]}: AssertionError: below a half"):
        counted.seeds(_fails_below_a_half, few=8, all=20)
    assert (counted.tried, counted.held) == (8, 8 - len(wanted))


def test_the_two_parts_are_all_cases() -> None:
    seen: list[str] = []
    names = [str(number) for number in range(10)]
    for few in (True, False):
        Tally("", few=few).cases(seen.append, names, few=3)
    assert len(seen) == 10
    assert sorted(seen) == names


def test_the_quick_part_can_be_named() -> None:
    parts: list[list[str]] = [[], []]
    for few, seen in zip((True, False), parts, strict=True):
        Tally("", few=few).cases(seen.append, ["a", "b", "c"], few=["b"])
    assert parts[0] == ["b"]
    assert sorted(parts[1]) == ["a", "c"]


@pytest.mark.parametrize(("chosen", "wanted"), [("7", [7]), ("7:9", [7, 8])])
def test_seeds_are_chosen(chosen: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_file, "CHOSEN", chosen)
    seen: list[float] = []
    Tally("", few=True).seeds(lambda random: seen.append(random.random()), few=1, all=2)
    assert seen == [random.Random(seed).random() for seed in wanted]


def test_a_name_that_no_case_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_file, "CHOSEN", "gelu,relo")
    with pytest.raises(ValueError, match=r"^RELIABILITY_CASES names no case of this test: relo$"):
        Tally("", few=True).cases(lambda name: None, ["gelu", "relu"], few=1)


def test_the_table_adds_up_the_parts() -> None:
    reports: list[Any] = [
        SimpleNamespace(nodeid=f"tests/reliability/test_a.py::test_b[{part}]", user_properties=[(PROPERTY, counts)])
        for part, counts in (("few", [3, 2, 1.5]), ("rest", [10, 10, 20.5]))
    ]
    assert [line.split() for line in summary(reports)] == [
        ["kind", "tried", "held", "seconds"],
        ["test_a.py::test_b", "13", "12", "22"],
    ]
    assert summary([]) == []
