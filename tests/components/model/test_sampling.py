import math

import pytest
import torch

from fuselayers.components.model.sampling import next_token

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0])


def shares(**arguments: object) -> list[float]:
    drawn = next_token(LOGITS.expand(40_000, 4), generator=torch.Generator().manual_seed(0), **arguments)
    return (drawn.bincount(minlength=4) / drawn.numel()).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1).tolist()
    assert shares(temperature=temperature) == pytest.approx(expected, abs=0.01)


def test_top_k_draws_among_the_likeliest() -> None:
    scale = 1 / (math.e**2 + math.e**3)
    assert shares(top_k=2) == pytest.approx([0, 0, math.e**2 * scale, math.e**3 * scale], abs=0.01)
    assert shares(top_k=99) == shares()


def test_top_p_draws_among_the_fewest_that_sum_to_it() -> None:
    whole = LOGITS.softmax(-1)
    kept = whole * torch.tensor([0.0, 0.0, 1.0, 1.0])
    for top_p in (float(whole[3]) + 0.01, float(whole[2:].sum()) - 0.01):
        assert shares(top_p=top_p) == pytest.approx((kept / kept.sum()).tolist(), abs=0.01)
    assert shares(top_p=1e-9) == [0, 0, 0, 1]
    assert shares(top_p=1.0) == shares()
    # The likeliest of the two has more than half of the probability.
    assert shares(top_k=2, top_p=0.5) == [0, 0, 0, 1]


def test_equal_logits_do_not_add_to_top_k() -> None:
    drawn = next_token(torch.zeros(1000, 5), top_k=2)
    assert len(drawn.unique()) == 2
