from dataclasses import replace

import pytest

from benchmarks.lint_kernels.roofline import CHIPS, Work, seconds_of, share_of

H200 = CHIPS["sm_90"]
COPY = Work(8192, 8, 128, instructions=100, shuffles=0, waits=1, ahead=False, moved=1 << 28)


def _share(work: Work) -> float:
    return share_of(work.moved, seconds_of(work, H200), H200)


def test_a_large_copy_is_as_fast_as_a_copy_and_a_small_one_is_not() -> None:
    assert 0.97 < _share(COPY) < 1
    assert _share(replace(COPY, moved=1 << 22)) < 0.6


def test_little_s_law() -> None:
    # One program with 8 KB in flight on each processor, and no work but to wait: 132 x 8 KB in every 0.8 us.
    tiles = 1000
    work = Work(132, 1, 128, instructions=0, shuffles=0, waits=tiles, ahead=True, moved=132 * 8192 * tiles)
    assert seconds_of(work, H200) - H200.start == pytest.approx(tiles * H200.latency)
    assert _share(work) == pytest.approx(132 * 8192 / H200.latency / H200.bandwidth, rel=0.01)
    assert _share(replace(work, programs=528, resident=4, moved=4 * work.moved)) > 0.97


def test_a_last_wave_runs_alone() -> None:
    wave = Work(264, 2, 256, instructions=100, shuffles=0, waits=100, ahead=True, moved=1 << 27)
    # A third program for each processor waits for the other two to end, and takes as long as both.
    late = replace(wave, programs=396, moved=wave.moved * 3 // 2)
    assert seconds_of(late, H200) - H200.start == pytest.approx(2 * (seconds_of(wave, H200) - H200.start), rel=0.01)


def test_instructions_take_the_time_beyond_the_budget() -> None:
    # 6.9 instructions for each byte that moves; see `figures`.
    programs, threads = 132 * 8 * 100, 128
    moved = 1 << 30
    at_budget = Work(programs, 8, threads, 6.9 * moved / programs / threads, 0, 1, True, moved)
    assert _share(at_budget) == pytest.approx(1, abs=0.03)
    assert _share(replace(at_budget, instructions=2 * at_budget.instructions)) == pytest.approx(0.5, abs=0.02)


def test_shuffles_and_waits_of_code_that_does_not_load_ahead_add_up() -> None:
    one = Work(132, 1, 32, instructions=0, shuffles=0, waits=1, ahead=False, moved=32)
    waiting = seconds_of(one, H200) - H200.start
    assert waiting == pytest.approx(H200.latency)
    with_shuffles = seconds_of(replace(one, shuffles=100), H200) - H200.start
    assert with_shuffles == pytest.approx(H200.latency + 100 * H200.shuffle / H200.clock)
    ahead = seconds_of(replace(one, shuffles=10, ahead=True), H200) - H200.start
    assert ahead == pytest.approx(H200.latency)
