import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import FusedBiasDropoutResidualLayerNorm, LayerNorm
from fuselayers.ops import NormStyle, dropout
from tests.components.compare import assert_same_step, randomise, run


class WrittenOut(nn.Module):
    def __init__(self, layer: FusedBiasDropoutResidualLayerNorm) -> None:
        super().__init__()
        self.bias, self.norm, self.p, self.style = layer.bias, layer.norm, layer.p, layer.style

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        def normed(z: Tensor) -> Tensor:
            centred = z - z.mean(-1, keepdim=True)
            scaled = centred / (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
            return scaled * self.norm.weight + self.norm.bias

        dropped = dropout(x if self.bias is None else x + self.bias, self.p, training=self.training)
        total = dropped + residual
        return {"post": normed(total), "pre": normed(dropped) + residual, "prenorm": (normed(total), total)}[self.style]


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
@pytest.mark.parametrize(
    ("backend", "p", "bias_shape"), [(None, 0.0, 7), (None, 0.3, 7), (None, 0.3, None), ("eager", 0.3, 7)]
)
def test_training(backend: str | None, style: str, p: float, bias_shape: int | None) -> None:
    layer = FusedBiasDropoutResidualLayerNorm(p, 7, bias_shape=bias_shape, style=style, eps=0.1, backend=backend)  # type: ignore[arg-type]
    randomise(layer)
    x, residual = torch.randn(5, 3, 7), torch.randn(5, 3, 7)
    assert_same_step(WrittenOut(layer), layer, x, residual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
def test_eval_drops_nothing(style: str) -> None:
    layer = FusedBiasDropoutResidualLayerNorm(0.9, 7, bias_shape=7, style=style, backend=None).eval()  # type: ignore[arg-type]
    x, residual = torch.randn(5, 7), torch.randn(5, 7)
    torch.testing.assert_close(layer(x, residual), WrittenOut(layer).eval()(x, residual), rtol=1e-4, atol=1e-5)


def test_state_dict_and_copies() -> None:
    layer = randomise(FusedBiasDropoutResidualLayerNorm(0.3, 7, bias_shape=7, backend="eager"))
    assert list(layer.state_dict()) == ["bias", "norm.weight", "norm.bias"]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_step(layer, other, torch.randn(2, 7), torch.randn(2, 7))


def with_a_hook(norm: nn.Module) -> None:
    norm.register_forward_hook(lambda module, arguments, y: 2 * y)


def with_a_forward_of_its_own(norm: nn.Module) -> None:
    called = norm.forward
    norm.forward = lambda x: 2 * called(x)  # type: ignore[assignment]


class Doubled(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", [with_a_hook, with_a_forward_of_its_own, "replaced"])
@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
def test_a_norm_that_does_more_is_called(style: NormStyle, change: Callable[[nn.Module], None] | str) -> None:
    layer = FusedBiasDropoutResidualLayerNorm(0.3, 7, bias_shape=7, style=style, eps=0.1, backend=None)
    randomise(layer)
    twice = copy.deepcopy(layer)
    with torch.no_grad():
        twice.norm.weight.mul_(2)
        twice.norm.bias.mul_(2)
    if isinstance(change, str):
        replacement = Doubled(7, eps=0.1)
        replacement.load_state_dict(layer.norm.state_dict())
        layer.norm = replacement
    else:
        change(layer.norm)
    x, residual = torch.randn(5, 7), torch.randn(5, 7)
    expected, got = run(twice, [x, residual]), run(layer, [x, residual])
    for name in ("gradient of norm.weight", "gradient of norm.bias"):
        expected[name] *= 2
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_under_autocast_its_bias_keeps_it_in_float32() -> None:
    layer = randomise(FusedBiasDropoutResidualLayerNorm(0.0, 7, bias_shape=7, style="prenorm", backend=None))
    x = torch.randn(3, 7).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = layer(x, x)
    assert normed.dtype == total.dtype == torch.float32
    assert torch.equal(total, x.float() + layer.bias + x.float())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"p": 1.0, "d_model": 4}, "p must be at least 0 and below 1, got 1.0"),
        ({"p": 0.1, "d_model": 0}, "d_model must be at least 1, got 0"),
        ({"p": 0.1, "d_model": 4, "bias_shape": 5}, "bias_shape must be d_model 4 or None, got 5"),
        ({"p": 0.1, "d_model": 4, "style": "posted"}, "no norm style 'posted'; did you mean 'post'?"),
    ],
)
def test_errors(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        FusedBiasDropoutResidualLayerNorm(**arguments)  # type: ignore[arg-type]
