import torch

from fuselayers.components import NoPosition


def test_changes_nothing() -> None:
    position = NoPosition()
    x, q, k = torch.randn(2, 3, 4), torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    assert position(x) is x
    assert position.rotate(q, k) == (q, k)
    assert not list(position.parameters())
