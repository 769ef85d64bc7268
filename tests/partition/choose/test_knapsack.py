import itertools
import random

import pytest

from fuselayers.partition.choose.knapsack import knapsack


def best_by_trying_all(sizes: list[int], values: list[float], capacity: int) -> float:
    subsets = itertools.product((0, 1), repeat=len(sizes))
    fitting = (taken for taken in subsets if sum(itertools.compress(sizes, taken)) <= capacity)
    return max(sum(itertools.compress(values, taken)) for taken in fitting)


@pytest.mark.parametrize("seed", range(60))
def test_as_good_as_trying_all(seed: int) -> None:
    number = random.Random(seed)
    unit = number.choice((1, 4, 64, 4096))
    count = number.randint(1, 9)
    sizes = [unit * number.randint(1, 12) for _ in range(count)]
    values = [float(number.randint(0, 9)) for _ in range(count)]
    capacity = number.randint(0, unit * 30)
    chosen = knapsack(sizes, values, capacity)
    assert chosen == sorted(set(chosen))
    assert sum(sizes[place] for place in chosen) <= capacity
    assert sum(values[place] for place in chosen) == best_by_trying_all(sizes, values, capacity)


def test_what_fits_only_unrounded_is_left_out() -> None:
    capacity = (1 << 16) * 10 + 1
    # Both together are exactly the capacity; cells of 11 bytes make them one cell too large.
    sizes = [capacity // 2, capacity - capacity // 2]
    assert sum(sizes) == capacity
    assert knapsack(sizes, [1.0, 2.0], capacity) == [1]
