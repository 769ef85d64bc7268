"""The fused layers of one op each: values and gradients by their formula, state, copies, errors."""

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import (
    FusedBiasActivationDropout,
    FusedBiasDropoutResidual,
    FusedBiasDropoutResidualLayerNorm,
    LayerNorm,
)
from fuselayers.ops import ACTIVATIONS, NormStyle, dropout
from tests.components.compare import assert_same_step, randomise, run

STYLES = ("post", "pre", "prenorm")
MADE: dict[str, Callable[..., nn.Module]] = {
    "activation": lambda p, bias, **options: FusedBiasActivationDropout(p, bias, activation="gelu", **options),
    "residual": FusedBiasDropoutResidual,
    **{
        style: lambda p, bias, style=style, **options: FusedBiasDropoutResidualLayerNorm(
            p, 7, bias_shape=bias, style=style, eps=0.1, **options
        )
        for style in STYLES
    },
}


class WrittenOut(nn.Module):
    """The formula of a fused layer, with the layer's own parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bias, self.p, self.style = layer.bias, layer.p, getattr(layer, "style", None)
        if self.style is not None:
            self.norm = layer.norm

    def normed(self, z: Tensor) -> Tensor:
        centred = z - z.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        return scaled * self.norm.weight + self.norm.bias

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        biased = x if self.bias is None else x + self.bias
        if residual is None:
            return dropout(nn.functional.gelu(biased), self.p, training=self.training)
        dropped = dropout(biased, self.p, training=self.training)
        if self.style is None:
            return dropped + residual
        if self.style == "pre":
            return self.normed(dropped) + residual
        total = dropped + residual
        return (self.normed(total), total) if self.style == "prenorm" else self.normed(total)


def inputs_of(name: str, *shape: int) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(1 if name == "activation" else 2)]


@pytest.mark.parametrize(
    ("backend", "p", "bias"), [("auto", 0.0, 7), ("auto", 0.3, 7), ("auto", 0.3, None), ("eager", 0.3, 7)]
)
@pytest.mark.parametrize("name", MADE)
def test_training_and_eval(name: str, backend: str, p: float, bias: int | None) -> None:
    layer = randomise(MADE[name](p, bias, backend=backend))
    written_out, inputs = WrittenOut(layer), inputs_of(name, 5, 3, 7)
    assert_same_step(written_out, layer, *inputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.eval()(*inputs), written_out.eval()(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_training_and_eval_have_the_same_activation(activation: str | None) -> None:
    layer = randomise(FusedBiasActivationDropout(0.0, 7, activation=activation))
    x = torch.randn(5, 7)
    expected = x + layer.bias if activation is None else ACTIVATIONS[activation](x + layer.bias)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x), expected)


@pytest.mark.parametrize("name", MADE)
def test_state_and_copies(name: str) -> None:
    layer = MADE[name](0.3, 7, backend="eager")
    assert layer.bias.tolist() == [0.0] * 7
    assert list(layer.state_dict()) == ["bias", *(["norm.weight", "norm.bias"] if name in STYLES else [])]
    assert MADE[name](0.3, None).bias is None
    randomise(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_step(layer, other, *inputs_of(name, 2, 7))
        assert other.bias is not layer.bias


@pytest.mark.parametrize("name", ["activation", "residual", "post"])
def test_a_layer_without_memory_is_filled_anew(name: str) -> None:
    with torch.device("meta"):
        layer = MADE[name](0.1, 7)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    for module in layer.modules():
        module.reset_parameters()  # type: ignore[operator]
    expected = MADE[name](0.1, 7).state_dict()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_x_and_the_residual_may_be_the_same_tensor() -> None:
    layer = FusedBiasDropoutResidual(0.0, backend="eager")
    x = torch.randn(3, 7, requires_grad=True)
    layer(x, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_behind_a_matmul_under_autocast_it_stays_in_bfloat16(backend: str) -> None:
    first = FusedBiasActivationDropout(0.0, 4, activation="relu", backend=backend)
    second = FusedBiasDropoutResidual(0.0, 4, backend=backend)
    for layer in (first, second):
        nn.init.normal_(layer.bias)
    linear = nn.Linear(4, 4, bias=False)
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    exact = (linear(x) + first.bias).relu(), linear(x) + second.bias + residual
    with torch.autocast("cpu", torch.bfloat16):
        z = linear(x)
        activated, added = first(z), second(z, residual.bfloat16())
        assert activated.dtype == added.dtype == torch.bfloat16
        assert second(z, residual).dtype == torch.float32  # a stream in float32 stays one
    for got, expected in zip((activated, added), exact, strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=0.03, atol=0.03)
    added.sum().backward()
    assert second.bias.grad.dtype == torch.float32
    assert second.bias.grad.eq(3).all()


def test_under_autocast_the_bias_of_a_norm_keeps_it_in_float32() -> None:
    layer = randomise(FusedBiasDropoutResidualLayerNorm(0.0, 7, bias_shape=7, style="prenorm"))
    x = torch.randn(3, 7).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = layer(x, x)
    assert normed.dtype == total.dtype == torch.float32
    assert torch.equal(total, x.float() + layer.bias + x.float())


def with_a_hook(norm: nn.Module) -> None:
    norm.register_forward_hook(lambda module, arguments, y: 2 * y)


def with_a_forward_of_its_own(norm: nn.Module) -> None:
    called = norm.forward
    norm.forward = lambda x: 2 * called(x)  # type: ignore[assignment]


class Doubled(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", [with_a_hook, with_a_forward_of_its_own, "replaced"])
@pytest.mark.parametrize("style", STYLES)
def test_a_norm_that_does_more_is_called(style: NormStyle, change: Callable[[nn.Module], None] | str) -> None:
    layer = randomise(MADE[style](0.3, 7))
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
    inputs = inputs_of(style, 5, 7)
    expected, got = run(twice, inputs), run(layer, inputs)
    for name in ("gradient of norm.weight", "gradient of norm.bias"):
        expected[name] *= 2
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


COMMON_ERRORS = [
    ({"p": 1.5}, "p must be at least 0 and at most 1, got 1.5"),
    ({"p": 0.1, "bias_shape": 0}, "bias_shape must be at least 1, got 0"),
    ({"p": 0.1, "backend": "inducter"}, "no backend 'inducter'; did you mean 'inductor'"),
    ({"p": 0.1, "partition": "mincut"}, "no partition"),
]
NORM_ERRORS = [
    ({"p": 1.5, "d_model": 4}, "p must be at least 0 and at most 1, got 1.5"),
    ({"p": 0.1, "d_model": 0}, "d_model must be at least 1, got 0"),
    ({"p": 0.1, "d_model": 4, "bias_shape": 5}, "bias_shape must be d_model 4 or None, got 5"),
    ({"p": 0.1, "d_model": 4, "style": "posted"}, "no norm style 'posted'; did you mean 'post'?"),
]


@pytest.mark.parametrize(
    ("layer", "arguments", "text"),
    [
        *((FusedBiasActivationDropout, *error) for error in COMMON_ERRORS),
        *((FusedBiasDropoutResidual, *error) for error in COMMON_ERRORS),
        (FusedBiasActivationDropout, {"p": 0.1, "activation": "glue"}, "no activation 'glue'; did you mean 'gelu'?"),
        *((FusedBiasDropoutResidualLayerNorm, *error) for error in NORM_ERRORS),
    ],
)
def test_errors(layer: type[nn.Module], arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        layer(**arguments)


def test_tensors_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^bias must be \[5\] to fit x \[3, 5\], got \[4\]$"):
        FusedBiasActivationDropout(0.1, 4)(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[3, 5\], got \[5\]"):
        FusedBiasDropoutResidual(0.1)(torch.zeros(3, 5), torch.zeros(5))
