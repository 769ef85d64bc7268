"""Plain calls that become ops in graphs for a GPU: the results, the gradients and the masks of a CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.ops.shards import Shard
from fuselayers.partition import fuse
from fuselayers.testing import results
from tests.generated_kernels import fake_gpu
from tests.ops.contract import tensors

pytestmark = pytest.mark.kernels
SHAPE, WIDTH = (2, 3, 64), 64
Call = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def gelu_mlp(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return F.linear(F.dropout(F.gelu(F.linear(x, weight, bias)), 0.3), weight)


def gpt2_mlp(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    z = torch.addmm(bias, x.view(-1, WIDTH), weight).view(x.size())
    z = 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * torch.pow(z, 3.0))))
    return F.linear(F.dropout(z, 0.3), weight)


def dropped_relu(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return F.dropout(torch.relu(x), 0.3) + F.linear(F.silu(F.linear(y, weight) + bias), weight)


def gates(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return F.linear(F.silu(x) * y, weight) + F.linear(x * F.gelu(y, approximate="tanh"), weight)


def pre_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    x = x + F.dropout(F.linear(F.layer_norm(x, (WIDTH,), scale, bias), weight, bias), 0.3)
    return F.dropout(F.linear(F.layer_norm(x, (WIDTH,), scale), weight), 0.3, training=True) + x


def post_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    x = F.layer_norm(F.dropout(F.linear(x, weight, bias), 0.3) + x, (WIDTH,), scale, bias, 1e-12)
    return F.layer_norm(x + F.linear(x, weight, bias), (WIDTH,), scale, bias)


def rms_norms(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """The first as in transformers, where it casts to float32."""
    wide = x.to(torch.float32)
    x = x + F.linear(scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), weight)
    return F.linear(F.rms_norm(x, (WIDTH,), scale), weight) + x


def attention(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    q, k, v = (F.linear(value, weight).unflatten(-1, (4, 16)).transpose(1, 2) for value in (x, y, x + y))
    z = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
    return F.linear(z.transpose(1, 2).flatten(2), weight) / 8


FORMS: dict[Call, set[str]] = {
    attention: {"attention_forward"},
    gelu_mlp: {"bias_activation_dropout"},
    gpt2_mlp: {"bias_activation_dropout"},
    dropped_relu: {"bias_activation_dropout"},
    gates: {"gated_activation"},
    pre_norm: {"bias_activation_dropout", "normalise"},
    post_norm: {"normalise"},
    rms_norms: {"normalise"},
}


def inputs() -> list[Tensor]:
    x, y, weight, bias, scale = tensors(SHAPE, SHAPE, (WIDTH, WIDTH), (WIDTH,), (WIDTH,))
    return [x, y, weight / 8, bias, scale]


def seeded(call: Callable[..., Any], *arguments: Any) -> Any:
    torch.manual_seed(7)
    return call(*arguments)


@pytest.mark.parametrize(("fn", "names"), FORMS.items(), ids=[fn.__name__ for fn in FORMS])
def test_results_and_masks_are_those_of_a_cpu(fn: Call, names: set[str]) -> None:
    options: Any = {"fallback": (), "fullgraph": True, "dynamic": False}
    expected = seeded(results, fuse(fn, backend="eager", **options), inputs())
    fused = fuse(fn, backend="triton", **options)
    if not INTERPRETED:
        torch.testing.assert_close(seeded(results, fused, inputs()), expected)
        return
    with fake_gpu() as gpu:
        got = seeded(results, partial(gpu.run, fused), inputs())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert gpu.ops[0] - {"draw_seed"} == names


def kept(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The kept elements of four masks, in the bits of the result."""
    weights = F.scaled_dot_product_attention(x[None, None], keys, values, dropout_p=0.4)[0, 0]
    return F.dropout(x, 0.5) + 2 * F.dropout(x, 0.25) + 4 * torch.nn.Dropout(0.1)(x) + 16 * weights.sign()


def test_one_seed_gives_one_mask_on_every_backend_and_device() -> None:
    """Of a plain model. Inductor's own generator would give a GPU other masks, and repeats them since torch 2.13."""
    inputs = torch.ones(25, 64), torch.zeros(1, 1, 64, 64), torch.eye(64)[None, None]
    options: Any = {"fallback": (), "fullgraph": True, "dynamic": False}
    expected = seeded(fuse(kept, backend="eager", **options), *inputs)
    assert len(expected.unique()) == 16
    assert torch.equal(seeded(fuse(kept, backend="inductor", **options), *inputs), expected)
    for backend in ("inductor", "triton"):
        fused = fuse(kept, backend=backend, **options)
        with fake_gpu() as gpu:
            assert torch.equal(seeded(gpu.run, fused, *inputs), expected)


def overwritten(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """Each op would read a value that has changed."""
    dropped = F.dropout(x, 0.3)
    residual = y.detach() * 2
    total = residual * 1
    residual.copy_(bias.detach())
    total = total + dropped + residual
    z = F.linear(x, weight) + 1
    activated = torch.relu(z).detach()
    dropped = F.dropout(activated, 0.3)
    activated.mul_(2.0)
    return total + residual + dropped + activated


def read_twice(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """Others read what an op would keep inside."""
    z = F.linear(x, weight, bias)
    activated = F.gelu(z)
    dropped = F.dropout(activated, 0.3)
    return (dropped + y) * dropped + activated + z


def of_other_shapes(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """A norm over two dimensions, and a residual that is broadcast."""
    normed = F.layer_norm(x, SHAPE[1:], y.sum(0))
    return F.dropout(normed + y, 0.3) + bias + F.dropout(scale, 0.3)


@pytest.mark.parametrize("fn", [overwritten, read_twice, of_other_shapes])
def test_what_is_no_op_is_left_alone(fn: Call) -> None:
    options: Any = {"fallback": (), "fullgraph": True, "dynamic": False}
    expected = seeded(results, fuse(fn, backend="eager", **options), inputs())
    fused = fuse(fn, backend="triton", **options)
    with fake_gpu() as gpu:
        got = seeded(results, partial(gpu.run, fused), inputs())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert gpu.ops[0] - {"draw_seed"} == {"dropout"}


_library = torch.library.Library("fuselayers_tests_of_calls", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("gelu(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("halve(Tensor(a!) x) -> ()")  # type: ignore[no-untyped-call]
_library.impl("gelu", lambda x: 3 * torch.relu(x), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("halve", lambda x: (x.mul_(0.5), None)[1], "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
_of_user: Any = torch.ops.fuselayers_tests_of_calls


def gate_of_overwritten(overwrite: Callable[[Tensor], Any]) -> Call:
    """The gate would read x after it has changed."""

    def gate(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        x = x * 1
        activated = F.silu(x)
        overwrite(x)
        return activated * y + x

    return gate


def own_gelu(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return _of_user.gelu(x) * y  # type: ignore[no-any-return]


def learned_eps(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + bias[0].exp())).to(x.dtype)


def default_eps(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """As `nn.RMSNorm` has it: float32's also for 16 bits, in which it would be 0.001."""
    return F.rms_norm(x.half() / 1000, (WIDTH,), scale.half())


def dropped_shard(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """The second half of a tensor's mask."""
    return ops.dropout(x, 0.4, shard=Shard((2, 0, 0), (4, *SHAPE[1:]))) + y


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(gate_of_overwritten(lambda x: F.relu(x, inplace=True)), id="inplace"),
        pytest.param(gate_of_overwritten(lambda x: F.relu(x, True)), id="inplace_by_position"),
        pytest.param(gate_of_overwritten(_of_user.halve), id="an_op_that_writes"),
        pytest.param(gate_of_overwritten(lambda x: x.__imul__(2)), id="imul"),
        pytest.param(gate_of_overwritten(lambda x: x.__setitem__(slice(None), 0)), id="setitem"),
        pytest.param(gate_of_overwritten(torch.compiler.allow_in_graph(lambda x: x.mul_(2))), id="untraced"),
        *(own_gelu, learned_eps, default_eps, dropped_shard),
    ],
)
def test_what_looks_like_an_op_has_the_results_of_a_cpu(fn: Call) -> None:
    options: Any = {"fallback": (), "fullgraph": True, "dynamic": False}
    arguments = [tensor.detach() for tensor in inputs()]
    expected = seeded(fuse(fn, backend="eager", **options), *arguments)
    fused = fuse(fn, backend="triton", **options)
    if not INTERPRETED:
        torch.testing.assert_close(seeded(fused, *arguments), expected)
        return
    with fake_gpu() as gpu:
        torch.testing.assert_close(seeded(gpu.run, fused, *arguments), expected, rtol=2e-3, atol=1e-4)
