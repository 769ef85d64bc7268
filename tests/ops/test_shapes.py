"""Every op refuses arguments that its formula cannot compute, with the same error text."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from tests.ops.contract import DEVICE, on_cpp, on_triton

X, ROW, WEIGHT = torch.randn(4, 16), torch.ones(16), torch.randn(8, 16)
TARGET = torch.arange(4)
HEADS, TABLE = torch.randn(1, 2, 4, 16), torch.ones(4, 8)

# The op, its tensors by name, its other arguments.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]] = {
    "dropout": (ops.dropout, {"x": X}, {"p": 0.1}),
    "bias_activation_dropout": (ops.bias_activation_dropout, {"x": X, "bias": ROW}, {"activation": "gelu", "p": 0.1}),
    "bias_dropout_residual": (ops.bias_dropout_residual, {"x": X, "residual": X, "bias": ROW}, {"p": 0.1}),
    "bias_dropout_residual_layer_norm": (
        ops.bias_dropout_residual_layer_norm,
        {"x": X, "residual": X, "weight": ROW, "norm_bias": ROW, "bias": ROW},
        {"p": 0.1},
    ),
    "bias_dropout_residual_rms_norm": (
        ops.bias_dropout_residual_rms_norm,
        {"x": X, "residual": X, "weight": ROW, "bias": ROW},
        {"p": 0.1},
    ),
    "residual_layer_norm": (ops.residual_layer_norm, {"x": X, "residual": X, "weight": ROW, "bias": ROW}, {}),
    "residual_rms_norm": (ops.residual_rms_norm, {"x": X, "residual": X, "weight": ROW}, {}),
    "layer_norm": (ops.layer_norm, {"x": X, "weight": ROW, "bias": ROW}, {}),
    "rms_norm": (ops.rms_norm, {"x": X, "weight": ROW}, {}),
    "gated_activation": (ops.gated_activation, {"gate": X, "up": X}, {}),
    "activate": (ops.activate, {"z": X}, {"activation": "gelu"}),
    "softmax": (ops.softmax, {"scores": X, "mask": X > 0}, {}),
    "log_softmax": (ops.log_softmax, {"scores": X, "mask": X}, {}),
    "rotary": (ops.rotary, {"q": HEADS, "k": HEADS, "cos": TABLE, "sin": TABLE}, {}),
    "attention": (ops.attention, {"q": HEADS, "k": HEADS, "v": HEADS, "bias": X[:, :4], "sinks": X[0, :2]}, {"p": 0.1}),
    "cross_entropy": (ops.cross_entropy, {"logits": X, "target": TARGET}, {}),
    "linear_cross_entropy": (
        ops.linear_cross_entropy,
        {"x": X, "weight": WEIGHT, "target": TARGET, "bias": torch.ones(8)},
        {},
    ),
}
TENSORS = [pytest.param(op, name, id=f"{op}-{name}") for op, (_, tensors, _) in CALLS.items() for name in tensors]
SEEDED = {op: {"seed": torch.tensor(1)} for op, (_, _, options) in CALLS.items() if "p" in options}
NORMS = [name for name in CALLS if "norm" in name]


def call(op: str, **changed: Any) -> Any:
    function, tensors, options = CALLS[op]
    return function(**{**tensors, **options, **changed})


def test_every_op_is_here() -> None:
    taken = {name for name, function in vars(ops).items() if "backend" in getattr(function, "__annotations__", {})}
    assert taken <= CALLS.keys()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_sparse_tensors_are_refused(op: str, name: str) -> None:
    tensor = CALLS[op][1][name]
    for sparse in (tensor.to_sparse(), tensor.to_sparse_csr() if tensor.dim() == 2 else tensor.to_sparse()):
        text = rf"^{name} must be a dense tensor, got layout {sparse.layout}; call \.to_dense\(\)$"
        with pytest.raises(TypeError, match=text):
            call(op, **{name: sparse})


@pytest.mark.parametrize("op", [name for name in CALLS if name not in ("dropout", "activate", "attention", "rotary")])
def test_a_tensor_without_dimensions_is_refused(op: str) -> None:
    name = next(iter(CALLS[op][1]))
    with pytest.raises(ValueError, match=rf"^{name} must be \[..., N\], got a tensor without dimensions; add one"):
        call(op, **{name: torch.tensor(1.0)})


@pytest.mark.parametrize(("op", "name"), [case for case in TENSORS if case.values[1] not in ("target", "mask")])
def test_integers_are_refused(op: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be a floating-point tensor, got torch.int64; convert it"):
        call(op, **{name: CALLS[op][1][name].long()})


@pytest.mark.parametrize(("op", "name"), [case for case in TENSORS if case.values[1] in ("residual", "weight")])
def test_a_tensor_that_an_op_needs_is_not_none(op: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be a floating-point tensor, got NoneType$"):
        call(op, **{name: None})


ROW_VECTORS = [
    case
    for case in TENSORS
    if case.values[1] in ("weight", "bias", "norm_bias") and case.values[0] not in ("attention", "linear_cross_entropy")
]


@pytest.mark.parametrize(("op", "name"), ROW_VECTORS)
def test_a_vector_fits_the_rows(op: str, name: str) -> None:
    for size in (1, 2):
        with pytest.raises(ValueError, match=rf"^{name} must be \[16\] to fit x \[4, 16\], got \[{size}\]$"):
            call(op, **{name: torch.ones(size)})
    with pytest.raises(
        ValueError, match=rf"^{name} must be on x's device cpu, got meta; move it with .to\(x.device\)$"
    ):
        call(op, **{name: torch.ones(16, device="meta")})


@pytest.mark.parametrize(("op", "name"), [case for case in TENSORS if case.values[1] in ("residual", "up")])
def test_a_second_input_has_the_shape_of_the_first(op: str, name: str) -> None:
    for shape in ([16], [1, 16], [4, 15]):
        with pytest.raises(ValueError, match=rf"^{name} must have x's shape \[4, 16\], got {re.escape(str(shape))}$"):
            call(op, **{name: torch.ones(shape)})
    with pytest.raises(
        ValueError, match=rf"^{name} must be on x's device cpu, got meta; move it with .to\(x.device\)$"
    ):
        call(op, **{name: X.to("meta")})


@pytest.mark.parametrize("op", ["bias_activation_dropout", "gated_activation", "activate"])
def test_an_unknown_activation(op: str) -> None:
    with pytest.raises(ValueError, match=r"^no activation 'gellu'; did you mean 'gelu'\? there are: gelu, gelu_tanh, "):
        call(op, activation="gellu")


@pytest.mark.parametrize("op", [name for name in NORMS if "dropout" in name])
def test_an_unknown_style(op: str) -> None:
    text = r"^no norm style 'prenrom'; did you mean 'prenorm'\? there are: post, pre, prenorm$"
    with pytest.raises(ValueError, match=text):
        call(op, style="prenrom")
    with pytest.raises(TypeError, match=r"^norm style must be a string, got a list$"):
        call(op, style=["post"])


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_floats_of_8_bits_are_refused(op: str, name: str) -> None:
    dtype = torch.float8_e5m2
    text = rf"^{name} must (be a floating-point tensor of 16 bits at least|be a bool tensor|hold class).*, got {dtype}"
    with pytest.raises(TypeError, match=text):
        call(op, **{name: CALLS[op][1][name].to(dtype)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("op", CALLS)
def test_quantized_tensors_are_refused(op: str) -> None:
    name = next(iter(CALLS[op][1]))
    quantized = torch.quantize_per_tensor(CALLS[op][1][name], 0.1, 0, torch.qint8)
    text = rf"^{name} must be a floating-point tensor, got torch\.qint8; call \.dequantize\(\)$"
    with pytest.raises(TypeError, match=text):
        call(op, **{name: quantized})


@pytest.mark.parametrize("op", NORMS)
def test_eps_is_finite_and_not_negative(op: str) -> None:
    """A NaN would make every value NaN, and infinity would make it zero."""
    for eps in (float("nan"), -1e-5, float("inf")):
        with pytest.raises(ValueError, match=rf"^eps must be finite and not negative, got {eps}$"):
            call(op, eps=eps)


@pytest.mark.parametrize("op", NORMS)
def test_eps_is_a_number(op: str) -> None:
    with pytest.raises(TypeError, match=r"^eps must be a number, got a Tensor; pass eps\.item\(\)$"):
        call(op, eps=torch.tensor(1e-5))
    for wrong in (None, "small"):
        with pytest.raises(TypeError, match=rf"^eps must be a number, got a {type(wrong).__name__}; pass a float$"):
            call(op, eps=wrong)
    call(op, eps=0)


@pytest.mark.parametrize("op", [name for name, (_, _, options) in CALLS.items() if "p" in options])
def test_p_is_a_probability(op: str) -> None:
    for p in (float("nan"), -0.1, 1.5):
        with pytest.raises(ValueError, match=rf"^dropout probability p must satisfy 0 <= p <= 1, got {p}$"):
            call(op, p=p)
    with pytest.raises(TypeError, match=r"^dropout probability p must be a number, got a tensor; pass p\.item"):
        call(op, p=torch.tensor(0.1))


SEED_ERRORS = [
    (torch.ones(3), ValueError, r"^seed must be an int64 tensor of shape \[\], got torch.float32 \[3\]$"),
    (7, TypeError, r"^seed must be an int64 tensor of shape \[\], got int; pass torch.tensor\(seed\), or None to d"),
    (torch.tensor(7, device="meta"), ValueError, r"^seed must be on x's device cpu, got meta; move it with .to\(x.dev"),
]


@pytest.mark.parametrize(("seed", "error", "text"), SEED_ERRORS, ids=["shape", "int", "device"])
@pytest.mark.parametrize("op", list(SEEDED))
def test_every_op_checks_its_seed(op: str, seed: Any, error: type[Exception], text: str) -> None:
    for training in (True, False):
        with pytest.raises(error, match=text):
            call(op, training=training, seed=seed)


@pytest.mark.parametrize("op", CALLS)
def test_the_checks_are_traced(op: str) -> None:
    torch.compiler.reset()
    seeded = SEEDED.get(op, {})
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(op, **seeded), call(op, **seeded))


# Each backend of each op scales by 1 / (1 - p) in separate code.
@pytest.mark.parametrize("backend", ["eager", on_cpp, on_triton])
@pytest.mark.parametrize("op", [op for op in SEEDED if op != "attention"])
def test_p_of_1_drops_everything(op: str, backend: str) -> None:
    # Enough elements that some random numbers are large.
    device = DEVICE if backend == "triton" else "cpu"
    x, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((32, 16), (16,)))
    tensors = {"x": x} | ({"residual": torch.randn(32, 16, device=device)} if "residual" in op else {})
    of_bias = {} if op == "dropout" else {"bias": bias}
    got = call(op, **tensors, **of_bias, p=1.0, backend=backend, training=True, seed=torch.tensor(3, device=device))
    with torch.no_grad():
        nothing = torch.zeros_like(x)
        expected = call(op, **{**tensors, "x": nothing}, bias=None, p=0.0) if "residual" in op else nothing
    torch.testing.assert_close(got, expected)
    gradients = torch.autograd.grad(got.square().sum() + got.sum(), [x, *of_bias.values()], allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)
