import torch

from fuselayers.components import NoPosition, Position


def test_the_base_and_none_change_nothing() -> None:
    x, q, k = torch.randn(2, 3, 4), torch.randn(2, 4, 3, 2), torch.randn(2, 2, 3, 2)
    for position in (Position(), NoPosition()):
        assert position(x) is x
        assert position.rotate(q, k) == (q, k)
        assert not list(position.parameters())
