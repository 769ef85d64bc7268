import random
import time

import torch

from fuselayers.partition.timer import Step, median_seconds, time_in_turns


def test_steps_take_turns_in_shuffled_order_after_a_warm_up() -> None:
    calls: list[str] = []

    def sleep(prepared: str) -> None:
        calls.append(prepared)
        time.sleep(0.01 if prepared == "slow" else 0)

    def prepare_slowly() -> str:
        time.sleep(0.05)  # does not count
        return "quick"

    before = random.getstate()
    steps = {"slow": Step(sleep, lambda: "slow"), "quick": Step(sleep, prepare_slowly)}
    times = time_in_turns(steps, device=torch.device("cpu"), rounds=5, warm_up=2, cold=True)
    assert {name: len(taken) for name, taken in times.items()} == {"slow": 5, "quick": 5}
    assert set(zip(calls[::2], calls[1::2], strict=True)) == {("slow", "quick"), ("quick", "slow")}
    assert len(calls) == 14
    seconds = median_seconds(times)
    assert seconds["slow"] > 0.009 > seconds["quick"]
    assert random.getstate() == before
