import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fuselayers.components import MLP, FusedMLP
from fuselayers.partition import saved_bytes
from tests.components.compare import assert_same_step, randomise

DIRECT_AND_FUSED = ["auto", "eager"]


def twins(hidden_dim: int = 7, *, backend: str = "auto", **options: object) -> tuple[MLP, FusedMLP]:
    plain = MLP(hidden_dim, **options)  # type: ignore[arg-type]
    fused = FusedMLP(hidden_dim, backend=backend, **options)  # type: ignore[arg-type]
    randomise(plain)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


@pytest.mark.parametrize(
    ("backend", "p", "bias"),
    [
        *(("auto", p, bias) for p in (0.0, 0.3) for bias in (True, False)),
        ("eager", 0.3, True),
        ("eager", 0.0, False),
    ],
)
def test_training_is_that_of_the_plain_mlp(backend: str, p: float, bias: bool) -> None:
    plain, fused = twins(backend=backend, dropout=p, bias=bias)
    assert_same_step(plain, fused, torch.randn(5, 3, 7))
    if backend == "auto":
        assert_same_step(plain, fused, torch.randn(9, 7))


@pytest.mark.parametrize("backend", DIRECT_AND_FUSED)
def test_eval_is_that_of_the_plain_mlp_and_drops_nothing(backend: str) -> None:
    plain, fused = twins(backend=backend, dropout=0.5)
    x = torch.randn(4, 7)
    fused(x)  # a graph for training exists before eval mode is asked for
    expected = plain.eval()(x)
    torch.testing.assert_close(fused.eval()(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_load_both_ways(bias: bool) -> None:
    plain, fused = MLP(7, bias=bias), FusedMLP(7, bias=bias)
    wanted = ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert list(plain.state_dict()) == list(fused.state_dict()) == [n for n in wanted if bias or "bias" not in n]
    x = torch.randn(2, 7)
    plain.load_state_dict(fused.state_dict())
    torch.testing.assert_close(plain(x), fused(x))
    randomise(plain)
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(x), fused(x))


@pytest.mark.parametrize("backend", DIRECT_AND_FUSED)
def test_copies_and_pickles_work_alone(backend: str) -> None:
    _, fused = twins(backend=backend, dropout=0.3)
    fused(torch.randn(2, 7))
    written = io.BytesIO()
    torch.save(fused, written)
    written.seek(0)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(written, weights_only=False)]
    for other in copies:
        assert_same_step(fused, other, torch.randn(2, 7))
        with torch.no_grad():
            other.up.bias.add_(1.0)
        assert not torch.equal(fused.up.bias, other.up.bias)


def test_under_autocast_it_stays_in_bfloat16() -> None:
    plain, fused = twins()
    seen: list[torch.dtype] = []
    fused.down.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(64, 7)
        torch.testing.assert_close(fused(x), plain(x), rtol=0.03, atol=0.03)
    assert seen == [torch.bfloat16]


class Adapter(nn.Module):
    """A low-rank adapter as it is put around a linear layer, whose weight and bias can be seen from outside."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.low = nn.Parameter(torch.randn(layer.in_features, 1))
        self.high = nn.Parameter(torch.randn(1, layer.out_features))

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.weight

    @property
    def bias(self) -> nn.Parameter:
        return self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.low @ self.high


def test_an_adapter_in_place_of_a_linear_is_called() -> None:
    plain, fused = twins()
    plain.up = Adapter(plain.up)  # type: ignore[assignment]
    fused.up = copy.deepcopy(plain.up)
    assert_same_step(plain, fused, torch.randn(4, 7))


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_hook_on_a_linear_is_called(register: str) -> None:
    _, fused = twins()
    calls: list[object] = []
    handle = getattr(fused.up, register)(lambda *arguments: calls.append(arguments[0]))
    fused(torch.randn(2, 7, requires_grad=True)).sum().backward()
    assert calls == [fused.up]
    handle.remove()
    fused(torch.randn(2, 7, requires_grad=True)).sum().backward()
    assert len(calls) == 1


def test_fused_it_keeps_no_mask_and_one_hidden_value_for_backward() -> None:
    # Kept must be: x, the pre-activation and the input of the second matmul; torch keeps a mask and the activation too.
    rows, hidden_dim = 32, 16
    layer = FusedMLP(hidden_dim, dropout=0.3, backend="eager")
    x = torch.randn(rows, hidden_dim, requires_grad=True)
    kept = saved_bytes(layer, x, parameters=tuple(layer.parameters()))
    assert kept <= 4 * rows * (hidden_dim + 2 * 4 * hidden_dim) + 64


def test_a_patched_forward_is_called() -> None:
    layer = FusedMLP(4)
    original = layer.up.forward
    layer.up.forward = lambda x: original(x) * 0
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x), layer.down(torch.zeros(2, 16)))
