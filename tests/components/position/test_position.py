import torch

from fuselayers.components import NoPosition, Position


def test_the_base_and_none_change_nothing() -> None:
    x, q, k = torch.randn(2, 3, 4), torch.randn(2, 4, 3, 2), torch.randn(2, 2, 3, 2)
    for position in (Position(), NoPosition()):
        assert position(x) is x
        assert position.rotate(q, k) == (q, k)
        assert not list(position.parameters())


def test_calling_a_position_is_its_embed() -> None:
    class Shifted(Position):
        def embed(self, x_BTD: torch.Tensor, *, first: int = 0) -> torch.Tensor:
            return x_BTD + 1 + first

    assert Shifted()(torch.zeros(1)).item() == 1
    assert Shifted()(torch.zeros(1), first=3).item() == 4
