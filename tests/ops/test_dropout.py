import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fuselayers.ops import (
    bias_activation_dropout,
    bias_dropout_residual,
    bias_dropout_residual_layer_norm,
    dropout,
)
from fuselayers.ops.dropout import dropout_reference
from fuselayers.partition import fuse, saved_bytes
from tests.ops import truth
from tests.ops.contract import (
    DTYPES,
    seed_of,
    tensors,
)


def op(x: torch.Tensor, *, p: float, seed: torch.Tensor) -> torch.Tensor:
    return dropout(x, p, seed=seed)


def reference(x: torch.Tensor, *, p: float, seed: torch.Tensor) -> torch.Tensor:
    return dropout_reference(x, p, seed=seed)


@pytest.mark.parametrize("columns", [20, 24])
def test_columns_whose_number_is_data(columns: int) -> None:
    """Nothing may be asked of a size that is known only when the graph runs."""
    x, seed = torch.randn(6, columns), seed_of()
    torch._dynamo.decorators.mark_unbacked(x, 1)
    compiled = torch.compile(lambda x, seed: dropout(x, 0.5, seed=seed) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, seed), dropout(x, 0.5, seed=seed) + 1)


def test_no_mask_is_saved() -> None:
    x = torch.randn(512, 512, requires_grad=True)
    assert saved_bytes(lambda value: dropout(value, 0.1), x) == 8


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_replays_the_mask(use_reentrant: bool) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return dropout(dropout(x, 0.5).sin(), 0.5)

    x = torch.randn(32, 32, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    torch.manual_seed(3)
    x.grad = None
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_is_its_formula() -> None:
    (x,) = tensors((3, 21), dtype=torch.float64)
    torch.testing.assert_close(op(x, p=0.3, seed=seed_of()), x * truth.dropout_factor(seed_of(), x.shape, 0.3))


def cubed(form: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Something whose second derivative depends on the mask; x comes around the dropout too, so nothing is constant."""
    return lambda x: (x + form(x, p=0.5, seed=seed_of())).pow(3).sum()


def second_by_autograd(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(fn(x), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def second_by_func(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda value: torch.func.grad(fn)(value).sum())(x)


@pytest.mark.parametrize(
    "second",
    [
        second_by_autograd,
        second_by_func,
        lambda fn, x: torch.func.hessian(fn)(x),
        lambda fn, x: torch.autograd.functional.hessian(fn, x),
        lambda fn, x: torch.func.jacrev(torch.func.jacrev(fn))(x),
        lambda fn, x: torch.func.jacfwd(torch.func.jacfwd(fn))(x),
    ],
    ids=[
        "autograd.grad twice",
        "func.grad twice",
        "func.hessian",
        "functional.hessian",
        "jacrev twice",
        "jacfwd twice",
    ],
)
def test_second_derivatives(second: Callable[..., Any]) -> None:
    (x,) = tensors((2, 9), dtype=torch.float64)
    expected = second(cubed(reference), x)
    assert expected.abs().sum() > 1
    torch.testing.assert_close(second(cubed(op), x), expected)


def test_gradcheck_in_every_direction() -> None:
    (x,) = tensors((2, 9), dtype=torch.float64)
    x.requires_grad_()
    assert torch.autograd.gradcheck(
        cubed(op), (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(cubed(op), (x,), check_fwd_over_rev=True, check_batched_grad=True)


def test_vmap_over_seeds() -> None:
    (x,) = tensors((2, 9))
    seeds = torch.stack([seed_of(1), seed_of(2), seed_of(3)])

    def gradient(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda value: dropout(value, 0.5, seed=seed).square().sum())(x)

    got = torch.func.vmap(gradient, in_dims=(None, 0))(x, seeds)
    torch.testing.assert_close(got, torch.stack([gradient(x, seed) for seed in seeds]), rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_vmap_obeys_randomness(compiled: bool) -> None:
    def samples(randomness: str) -> torch.Tensor:
        mapped = torch.func.vmap(lambda value: dropout(value, 0.5), randomness=randomness)
        return (torch.compile(mapped, backend="aot_eager", fullgraph=True) if compiled else mapped)(torch.ones(4, 65))

    same, different = samples("same"), samples("different")
    assert all(torch.equal(same[0], sample) for sample in same)
    assert len({tuple(sample.tolist()) for sample in different}) == 4
    # Dynamo raises an error of its own class, which quotes vmap's.
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
        samples("error")


def test_nested_vmap_obeys_each_randomness() -> None:
    inner = torch.func.vmap(lambda value: dropout(value, 0.5), randomness="different")
    got = torch.func.vmap(inner, randomness="same")(torch.ones(2, 3, 65))
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[0, 0], got[0, 1])


@pytest.mark.parametrize(
    "dtype", [*DTYPES[:2], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[2:])], ids=str
)
@pytest.mark.parametrize("compile_", [torch.compile, fuse], ids=["torch.compile", "fuse"])
def test_compiled_gradient_reaches_what_came_before(compile_: Callable[..., Any], dtype: torch.dtype) -> None:
    def chain(form: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: form(form(x.sin(), p=0.5, seed=seed_of(1)).sin(), p=0.5, seed=seed_of(2))

    (x,) = tensors((4, 9), dtype=dtype)
    x.requires_grad_()
    backend = "eager" if compile_ is fuse else "aot_eager"
    (got,) = torch.autograd.grad(compile_(chain(op), backend=backend)(x).sum(), x)
    (expected,) = torch.autograd.grad(chain(reference)(x).sum(), x)
    assert expected.abs().sum() > 1
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_plain_torch_compile_saves_no_mask_for_backward(backend: str) -> None:
    x = torch.randn(64, 128, requires_grad=True)
    assert saved_bytes(torch.compile(lambda value: dropout(value, 0.1), backend=backend), x) == 8
    through_gelu = torch.compile(lambda value: dropout(torch.nn.functional.gelu(value), 0.1), backend=backend)
    assert saved_bytes(through_gelu, x) == x.numel() * 4 + 8


def test_every_call_draws_afresh() -> None:
    x = torch.ones(64, 64)
    assert not torch.equal(dropout(x, 0.5), dropout(x, 0.5))


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_errors(p: float) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"^dropout probability p must satisfy 0 <= p <= 1, got {p}$"):
        dropout(torch.ones(2), p)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn


SEED_ERRORS = [
    (torch.ones(3), ValueError, r"^seed must be an int64 tensor of shape \[\], got torch.float32 \[3\]$"),
    (7, TypeError, r"^seed must be an int64 tensor of shape \[\], got int; pass torch.tensor\(seed\), or None to have"),
    (torch.tensor(7, device="meta"), ValueError, r"^seed must be on x's device cpu, got meta; move it with .to\(x.dev"),
]


@pytest.mark.parametrize(("seed", "error", "text"), SEED_ERRORS, ids=["shape", "int", "device"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        dropout,
        lambda x, p, **options: bias_activation_dropout(x, p=p, **options),
        lambda x, p, **options: bias_dropout_residual(x, x, p=p, **options),
        lambda x, p, **options: bias_dropout_residual_layer_norm(x, x, weight=torch.ones(2), p=p, **options),
    ],
    ids=["dropout", "bias_activation_dropout", "bias_dropout_residual", "bias_dropout_residual_layer_norm"],
)
def test_every_op_checks_its_seed(
    call: Callable[..., Any], training: bool, seed: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(torch.ones(2, 2), 0.5, training=training, seed=seed)


def test_a_refused_call_draws_no_seed() -> None:
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, got torch.int64"):
        dropout(torch.ones(2, dtype=torch.int64), 2.0)
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, got torch.int64"):
        torch.func.vmap(lambda x: dropout(x, 0.5))(torch.ones(2, 2, dtype=torch.int64))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_that_outlives_its_transform_has_its_gradient() -> None:
    kept: list[torch.Tensor] = []

    def escapes(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sum()

    leaf = torch.arange(1.0, 9.0, requires_grad=True)
    torch.func.grad(escapes)(leaf)
    seed = torch.tensor(7)
    (got,) = torch.autograd.grad(dropout(kept[0], 0.5, seed=seed).sum(), leaf)
    assert torch.equal(got, dropout(torch.ones(8), 0.5, seed=seed))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "shape",
    [pytest.param((2, 5, 20), id="op by op"), pytest.param((300, 256), id="compiled", marks=pytest.mark.slow)],
)
def test_torch_jit_trace(shape: tuple[int, ...]) -> None:
    """A trace draws at every call, takes other sizes and has gradients; a file of it needs no op of this library."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return bias_activation_dropout(x, p=0.5)

    traced = torch.jit.trace(layer, torch.randn(shape, requires_grad=True))
    assert "fuselayers::" not in str(traced.graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)

    x = torch.randn([size + 1 for size in shape], requires_grad=True)
    for call in (traced, loaded):
        torch.manual_seed(3)
        got = call(x)
        assert not torch.equal(got, call(x))
        torch.manual_seed(3)
        expected = layer(x)
        assert torch.equal(got, expected)
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("nothing", [{"p": 0.0}, {"p": 0.5, "training": False}])
def test_no_dropout_draws_no_seed(nothing: dict[str, Any]) -> None:
    x, before = torch.ones(2), torch.get_rng_state()
    assert dropout(x, **nothing) is x
    assert dropout(x, **nothing, seed=torch.tensor(7)) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_of_dtypes() -> None:
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, got list$"):
        dropout([1.0], 0.3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, got torch.int64; convert it"):
        dropout(torch.full((8,), 10), 0.3)
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, got torch.complex64; convert it, for ex"):
        dropout(torch.ones(2, dtype=torch.complex64), 0.3)
    with pytest.raises(TypeError, match=r"^dropout probability p must be a number, got a tensor; pass p.item\(\)$"):
        dropout(torch.ones(2), torch.tensor(0.5))
