import pytest
import torch

from fuselayers.components import LearnedPosition


def test_each_token_gets_the_row_of_its_place() -> None:
    position = LearnedPosition(5, 3)
    x = torch.randn(2, 4, 3)
    got = position(x)
    for place in range(4):
        torch.testing.assert_close(got[:, place], x[:, place] + position.table.weight[place])
    q = torch.randn(2, 1, 4, 2)
    assert position.rotate(q, q) == (q, q)


def test_a_full_context_fits_and_a_longer_one_does_not() -> None:
    position = LearnedPosition(4, 3)
    position(torch.zeros(1, 4, 3))
    text = (
        "a sequence of 5 tokens does not fit the context_length 4; shorten it, or build the model with a longer context"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        position(torch.zeros(1, 5, 3))
