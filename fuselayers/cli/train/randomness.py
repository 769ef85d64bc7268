"""The random numbers of a step: they follow from the seed and the step, so a checkpoint holds no generator's state."""

import hashlib

import torch


def seed_generators(seed: int, *, step: int, micro_batch: int = 0, dp_rank: int = 0) -> None:
    """Seed torch's generators, on all devices, for a forward and backward.

    Whatever drew numbers before, as a validation or the model's first values, changes nothing. All ranks of a
    tensor-parallel group have one `dp_rank` and draw the same numbers.

    Args:
        seed: of the run.
        step: 1 for the first.
        micro_batch: 0 for the first of the step.
        dp_rank: the data-parallel rank, each of which draws its own numbers.

    >>> seed_generators(1234, step=7)
    >>> first = torch.rand(3)
    >>> seed_generators(1234, step=7)
    >>> torch.equal(torch.rand(3), first)
    True
    """
    # Consecutive seeds of a Mersenne twister are correlated, and it takes 32 bits: hash the numbers together.
    digest = hashlib.blake2b(f"generators/{seed}/{step}/{micro_batch}/{dp_rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))
