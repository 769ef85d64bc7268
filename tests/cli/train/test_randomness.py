import itertools

import torch

from fuselayers.cli.train.randomness import seed_generators


def _drawn(seed: int, step: int, micro_batch: int, dp_rank: int) -> tuple[float, ...]:
    seed_generators(seed, step=step, micro_batch=micro_batch, dp_rank=dp_rank)
    return tuple(torch.rand(4).tolist())


def test_each_seed_step_micro_batch_and_rank_draws_its_own_numbers() -> None:
    cases = list(itertools.product((1, 2, 12), repeat=4))
    drawn = [_drawn(*case) for case in cases]
    assert len(set(drawn)) == len(cases)
    torch.manual_seed(0)
    assert [_drawn(*case) for case in cases] == drawn


def test_the_numbers_stay_those_of_older_checkpoints() -> None:
    # A resumed run repeats an uninterrupted one: the hash is a part of the format of a checkpoint.
    seed_generators(1234, step=7, micro_batch=1)
    assert torch.initial_seed() == 9_209_100_590_086_815_833
