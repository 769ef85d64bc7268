import pytest
import torch

from fuselayers.components import SkipNorm


def test_it_is_x_itself() -> None:
    norm, x = SkipNorm(7), torch.randn(3, 7)
    assert norm(x) is x
    assert not norm.state_dict()
    assert repr(norm) == "SkipNorm(7)"


def test_one_graph_for_a_compiler() -> None:
    norm, x, residual = SkipNorm(7), torch.randn(3, 7), torch.randn(3, 7)
    add = torch.compile(norm.add, backend="aot_eager", fullgraph=True)
    for got in add(x, residual):
        torch.testing.assert_close(got, x + residual, rtol=0, atol=0)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^hidden_dim must be at least 1, got 0$"):
        SkipNorm(0)
    with pytest.raises(ValueError, match=r"^x must be \[..., 7\], got \[2, 8\]$"):
        SkipNorm(7)(torch.zeros(2, 8))
