import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import DynamicTanh
from tests.components.compare import assert_same_step, randomise


class WrittenOut(nn.Module):
    """The formula, with the exponentials of tanh."""

    def __init__(self, norm: DynamicTanh) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        grown, shrunk = torch.exp(self.alpha * x), torch.exp(-self.alpha * x)
        y = self.weight * (grown - shrunk) / (grown + shrunk)
        return y + self.bias if hasattr(self, "bias") else y


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden_dim", [1, 7, 129])
def test_values_and_gradients(hidden_dim: int, bias: bool) -> None:
    norm = randomise(DynamicTanh(hidden_dim, bias=bias)).double()
    x = torch.randn(2, 3, hidden_dim).double()
    assert_same_step(WrittenOut(norm), norm, x, rtol=1e-9, atol=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_dtype_of_x_is_kept(weights: torch.dtype) -> None:
    norm, x = randomise(DynamicTanh(7)), torch.randn(3, 7)
    y = copy.deepcopy(norm).to(weights)(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm(x), rtol=0.02, atol=0.02)


def test_one_graph_for_a_compiler_and_copies() -> None:
    norm, x = randomise(DynamicTanh(7)), torch.randn(3, 7)
    torch.testing.assert_close(torch.compile(norm, backend="aot_eager", fullgraph=True)(x), norm(x))
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        torch.testing.assert_close(other(x), norm(x), rtol=0, atol=0)


def test_names_and_errors() -> None:
    norm = DynamicTanh(7)
    # alpha is [1] as in the authors' code, whose checkpoints load.
    assert {name: tuple(value.shape) for name, value in norm.state_dict().items()} == {
        "alpha": (1,),
        "weight": (7,),
        "bias": (7,),
    }
    assert repr(norm) == "DynamicTanh(7, alpha=0.5, bias=True)"
    with pytest.raises(ValueError, match=r"^hidden_dim must be at least 1, got 0$"):
        DynamicTanh(0)
    with pytest.raises(ValueError, match=r"^alpha must be above 0, got 0$"):
        DynamicTanh(7, alpha=0)
    with pytest.raises(ValueError, match=r"^x must be \[..., 7\], got \[2, 8\]$"):
        norm(torch.zeros(2, 8))
