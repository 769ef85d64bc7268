import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layers import LAYERS
from fuselayers._torch.tracing import torch_default_partition
from fuselayers.components import MultiHeadAttention
from fuselayers.ops import cross_entropy, dropout, linear_cross_entropy, linear_log_prob
from fuselayers.partition import SavePolicy, capture, explain, fuse, saved_bytes

WAYS = ("bfloat16", "float8", "int8")
# The largest error over the row's largest value: half a step, or a whole step where rounding is random.
STEP = {"bfloat16": 2**-8, "float8": 2**-4, "int8": 1 / 125.99}


def read_by_backward(x: Tensor, way: str | None, *, backend: str = "eager", **options: Any) -> Tensor:
    """The values that backward reads in place of x: the gradient of y in x * y."""
    fused: Any = fuse(lambda x, y: x * y, backend=backend, fallback=(), compress=way, **options)
    y = torch.ones_like(x, requires_grad=True)
    torch.manual_seed(0)
    (restored,) = torch.autograd.grad(fused(x.requires_grad_(), y).sum(), y)
    return restored


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).sin()


def scores_of_1000(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The values are exact, since the caller holds them."""
    return (F.scaled_dot_product_attention(17 * q, 17 * k, v.detach()) * v.detach()).sum()


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def int8_and_exact(fn: Callable[..., Tensor], *args: Tensor, of: Tensor, backend: str = "eager") -> Iterator[Tensor]:
    """The gradient of a tensor, with int8 saves and with exact ones."""
    for way in ("int8", None):
        out: Any = fuse(fn, backend=backend, compress=way)(*args)
        yield torch.autograd.grad(out.sum(), of)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_backward_reads_the_value_rounded(way: str, dtype: torch.dtype) -> None:
    x = torch.randn(7, 5, 129, dtype=dtype)
    restored = read_by_backward(x, way)
    assert restored.dtype == dtype
    if way == "bfloat16" and dtype == torch.bfloat16:
        assert torch.equal(restored, x)
        return
    assert not torch.equal(restored, x)
    largest = x.detach().abs().amax(-1, keepdim=True) * (STEP[way] + 2 * torch.finfo(dtype).eps)
    assert ((restored - x).abs() <= largest).all()


@pytest.mark.parametrize("way", WAYS)
def test_zeros_infinities_and_nan_come_back(way: str) -> None:
    x = torch.randn(40, 129)
    x[0] = 0
    x[1, 3], x[2, 4], x[3, 5] = math.inf, -math.inf, math.nan
    x[4], x[5], x[6] = math.inf, math.nan, -math.inf
    x[7, 0], x[7, 1], x[7, 2] = math.inf, -math.inf, math.nan
    x[8] = 1.78e-43 * x[8].sign()  # its scale has a single bit
    restored = read_by_backward(x, way)
    finite = x.isfinite()
    torch.testing.assert_close(restored[~finite], x[~finite], rtol=0, atol=0, equal_nan=True)
    assert (restored[0] == 0).all()
    torch.testing.assert_close(restored[finite], x[finite].detach(), rtol=0.07, atol=0.04)


def test_int8_has_no_bias() -> None:
    """Rounding to nearest would turn every 0.3 of a step into 0, and so the gradient, their sum."""
    step = 1 / 125.99
    x = torch.full((64, 256), 0.3 * step)
    x[:, 0] = 1.0
    fused: Any = fuse(lambda x, weight: x @ weight, backend="eager", compress="int8")
    weight = torch.zeros(256, 1, requires_grad=True)
    torch.manual_seed(0)
    gradients = [torch.autograd.grad(fused(x.requires_grad_(), weight).sum(), weight)[0] for _ in range(64)]
    mean = torch.cat(gradients)[:, 0].view(64, 256)[:, 1:].double().mean()
    # Six deviations of the mean of 64 calls x 255 columns x 64 rows, each draw deviating by half a step.
    assert abs(mean / (64 * step) - 0.3) < 6 * 0.5 / math.sqrt(64 * 255 * 64)


def test_int8_draws_anew_in_each_call() -> None:
    fused: Any = fuse(lambda x, y: x * y, backend="eager", compress="int8")
    x, y = torch.randn(64, 128, requires_grad=True), torch.ones(64, 128, requires_grad=True)
    torch.manual_seed(0)
    first, second = (torch.autograd.grad(fused(x, y).sum(), y)[0] for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(torch.autograd.grad(fused(x, y).sum(), y)[0], first)
    assert not torch.equal(first, second)


def test_masks_are_those_of_exact_saves() -> None:
    """Rounding shares the seed of a dropout, if no other random number is drawn before it."""
    layer = LAYERS["GPT, SDPA"].make(64, 4, dropout=0.5)
    x = torch.randn(2, 64, 64)
    results = []
    for way in ("int8", None):
        torch.manual_seed(0)
        results.append((fuse(layer, backend="eager", compress=way)(x), torch.rand(1)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def noisy(x: Tensor) -> Tensor:
    """A random op comes before the first dropout."""
    return (dropout(x + torch.rand_like(x), 0.5) * x).sin()


def writing(x: Tensor, weight: Tensor) -> Tensor:
    return x.mul_(2) @ weight


@pytest.mark.parametrize(
    ("fn", "shapes", "bound"),
    [
        (noisy, [(64, 128)], 0.05),
        (writing, [(64, 64), (64, 64)], 0.02),
        # A constant added to all keys changes no softmax: the gradient of the keys' bias is zero but for rounding.
        (MultiHeadAttention(64, num_heads=4, bias=True, projections="separate"), [(2, 64, 64)], 0.1),
    ],
    ids=["noisy", "writing", "keys"],
)
def test_errors_of_gradients(fn: Callable[..., Any], shapes: list[tuple[int, ...]], bound: float) -> None:
    inputs = [torch.randn(shape, requires_grad=True) * 1 for shape in shapes]
    errors = explain(fn, *inputs, backend="eager", compress="int8").gradient_errors
    assert 0 < max(errors.values()) < bound


def test_each_device_has_a_seed_of_its_own() -> None:
    """The meta device is the second device."""

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return dropout(x, 0.1).sin(), dropout(y, 0.1).sin()

    leaves = [torch.randn(64, 128, device=device, requires_grad=True) for device in ("cpu", "meta")]
    fused: Any = fuse(both, backend="eager", fallback=(), compress="int8")
    gradients = torch.autograd.grad(fused(*leaves), leaves, [torch.ones_like(leaf) for leaf in leaves])
    assert [gradient.device for gradient in gradients] == [leaf.device for leaf in leaves]


# Compiling takes seconds, so only int8, with the longest code, runs every day.
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "int8" else pytest.mark.slow) for way in WAYS])
def test_inductor_rounds_as_eager(way: str) -> None:
    x = torch.randn(33, 257)
    x[1, 3], x[2, 4], x[3, 5], x[4] = math.inf, -math.inf, math.nan, 0.0
    eager, inductor = (read_by_backward(x, way, backend=backend) for backend in ("eager", "inductor"))
    torch.testing.assert_close(inductor, eager, rtol=0, atol=0, equal_nan=True)


def test_each_size_has_its_numbers_with_dynamic_sizes() -> None:
    for rows in (64, 80):
        x = torch.randn(rows, 130)
        restored = read_by_backward(x, "int8", dynamic=True)
        assert 0 < relative_error(restored, x.detach()) < 0.02


# GPT in three ways, and Llama, which has other ops, in the way that saves most; each compiles for a second.
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("GPT, SDPA", WAYS),
        ("Llama", ("int8",)),
        *(pytest.param(name, WAYS, marks=pytest.mark.slow) for name in LAYERS if name != "GPT, SDPA"),
    ],
)
def test_gradients_of_a_layer(name: str, ways: tuple[str, ...]) -> None:
    """The inputs are random, so that errors do not average out. Forward stays exact."""
    layer = LAYERS[name].make(64, 4, dropout=0.0)
    x, weight = torch.randn(2, 64, 64), torch.randn(2, 64, 64, dtype=torch.float64)
    plain, gradients = fuse(layer, backend="eager")(x), {}
    for way in ways:
        y = fuse(layer, backend="eager", compress=way)(x)
        assert torch.equal(y, plain)
        gradients[way] = torch.autograd.grad((y * weight).sum(), list(layer.parameters()))
    exact = torch.autograd.grad((layer.double()(x.double()) * weight).sum(), list(layer.parameters()))
    for way in ways:
        errors = sorted(map(relative_error, gradients[way], exact))
        bound = {"bfloat16": 0.004, "float8": 0.05, "int8": 0.02}[way]
        assert errors[len(errors) // 2] < bound
        assert 0 < errors[-1] < 2 * bound


@pytest.mark.parametrize(
    ("name", "dtype", "bfloat16", "int8"),
    [
        ("GPT, SDPA", torch.float32, 5.2, 3.1),
        ("BERT post-norm", torch.float32, 5.7, 3.4),
        ("Llama", torch.float32, 5.7, 3.4),
        ("GPT, SDPA", torch.bfloat16, 10.1, 6.6),
    ],
)
def test_units_of_a_layer(name: str, dtype: torch.dtype, bfloat16: float, int8: float) -> None:
    layer = LAYERS[name].make(256, 4, dropout=0.1).to(dtype)
    x = torch.randn(4, 128, 256, dtype=dtype, requires_grad=True)
    (graph,) = capture(layer, x)
    for way, units in (("bfloat16", bfloat16), ("int8", int8)):
        joint = graph.joint(compress=way)
        saved = SavePolicy("min_cut", compress=way).saved_values(joint, fused=True)
        assert joint.saved_bytes(saved) <= units * x.nbytes


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


@pytest.mark.parametrize("partition", ["default", torch_default_partition], ids=["default", "custom"])
def test_the_report_counts_what_is_saved(partition: Any) -> None:
    layer, x = mlp(), torch.randn(2, 64, 64, requires_grad=True)
    exact, fused = (fuse(layer, backend="eager", partition=partition, compress=way) for way in (None, "int8"))
    report = explain(fused, x)
    kept = saved_bytes(fused, x)
    assert report.totals["this"].saved_bytes == sum(value.num_bytes for value in report.saved) == kept
    assert kept < 0.3 * saved_bytes(exact, x)
    got, expected = (torch.autograd.grad(run(x).square().sum(), x)[0] for run in (fused, exact))
    assert 0 < relative_error(got, expected) < 0.02
    assert report.compress == "int8"
    assert report.gradient_errors


def test_a_budget_compresses_before_it_recomputes_a_product() -> None:
    layer, x = LAYERS["GPT, SDPA"].make(64, 4).to("meta"), torch.empty(2, 64, 64, requires_grad=True, device="meta")
    exact, compressed = (explain(layer, x, partition="budget:0.25", compress=way).totals for way in (None, "int8"))
    assert exact["this"].recomputed_flops > 0 == compressed["this"].recomputed_flops
    for totals in (exact, compressed):
        assert totals["this"].saved_bytes <= 0.25 * exact["default"].saved_bytes


class TestStaysExact:
    def why(self, fn: Callable[..., Any], *args: Tensor) -> set[str | None]:
        saved = explain(fn, *args, backend="eager", partition="default", compress="int8").saved
        return {value.why_exact for value in saved if value.dtype != "int"}

    def test_the_log_sum_exp_of_attention(self) -> None:
        """int8 would round a value of 8 with an error of 0.06, which is 6 % of each weight in backward."""
        q, k, v = (torch.randn(2, 4, 1024, 32, requires_grad=True) for _ in range(3))
        assert self.why(attention, q, k, v) == {None, "it is a statistic"}
        assert relative_error(*int8_and_exact(attention, q, k, v, of=v)) < 0.02

    def test_queries_and_keys_have_16_bits(self) -> None:
        """Their product is an exponent: with scores of 30, int8's error of 1 % would be 0.3."""
        q, k, v = (torch.randn(2, 4, 128, 32, requires_grad=True) for _ in range(3))

        def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(*(torch.cat((x.cos(), x.sin()), -1) for x in (q, k)), torch.cat((v, v), -1))

        for fn in (attention, rotated):
            saved = explain(fn, q, k, v, backend="eager", compress="int8").saved
            sizes = {value.exact_bytes / value.num_bytes for value in saved if value.why_exact is None}
            assert {round(size) for size in sizes} == {2, 4}

    @pytest.mark.parametrize(("way", "bound"), [("bfloat16", 0.05), ("float8", 0.6), ("int8", 0.25)])
    def test_large_scores(self, way: str, bound: float) -> None:
        """In bfloat16 a score of 1,000 had an error of 4, and the gradient of the keys one of 150 %. What is left comes
        from the output of attention, where one key has all the weight."""
        q, k, v = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))
        exact, rounded = (
            torch.autograd.grad(fuse(scores_of_1000, backend="eager", compress=compress)(q, k, v), (q, k))
            for compress in (None, way)
        )
        assert max(map(relative_error, rounded, exact)) < bound

    def test_arguments_of_sines(self) -> None:
        """int8 would err by 0.5 radians."""
        x, weight = torch.randn(64, 128), (20 * torch.randn(128, 128)).requires_grad_()
        rounded, exact = int8_and_exact(lambda x, weight: (x @ weight).sin() / 100, x, weight, of=weight)
        assert 0 < relative_error(rounded, exact) < 0.01
        x[0, 0], x[1, 0], x[2] = math.inf, math.nan, 0.0
        special = x.requires_grad_()
        rounded, exact = int8_and_exact(lambda x: x.sin(), special, of=special)
        torch.testing.assert_close(rounded, exact, rtol=0, atol=1e-3, equal_nan=True)

    @pytest.mark.parametrize(
        "op",
        [
            lambda *args: linear_cross_entropy(*args, reduction="none").mean(),
            lambda *args: linear_log_prob(*args)[0].mean(),
        ],
        ids=["linear_cross_entropy", "linear_log_prob"],
    )
    def test_the_input_of_a_fused_loss_has_16_bits(self, op: Callable[..., Tensor]) -> None:
        """Backward recomputes the logits. With int8 its gradients would be off by 10 %."""
        x, u, targets = 2 * torch.randn(512, 64), torch.randn(64, 64) / 8, torch.randint(256, (512,))
        weight = nn.Parameter(torch.randn(256, 64))

        def loss(x: Tensor, u: Tensor) -> Tensor:
            return op(x @ u, weight, targets)

        report = explain(loss, x.requires_grad_(), u.requires_grad_(), backend="eager", compress="int8")
        assert max(report.gradient_errors.values()) < 0.02

    @pytest.mark.parametrize(
        ("backend", "op"),
        [
            ("eager", F.cross_entropy),
            pytest.param("inductor", F.cross_entropy, marks=pytest.mark.slow),
            ("eager", cross_entropy),
            ("eager", lambda x, _: F.softplus(x).sum()),
        ],
        ids=["F.cross_entropy", "F.cross_entropy inductor", "ops.cross_entropy", "softplus"],
    )
    def test_exponents(self, backend: str, op: Callable[..., Tensor]) -> None:
        """A probability of 1e-6 is saved as its logarithm, -14, of which int8's step would be about 0.1."""
        x, targets = (10 * torch.randn(64, 128)).requires_grad_(), torch.randint(128, (64,))

        def loss(x: Tensor) -> Tensor:
            return op(x, targets)

        saved = explain(loss, x, backend=backend, compress="int8").saved
        assert "backward takes its exponential" in {value.why_exact for value in saved}
        assert torch.equal(*int8_and_exact(loss, x, of=x, backend=backend))

    def test_statistics_small_values_and_what_the_caller_holds(self) -> None:
        def scaled(x: Tensor) -> Tensor:
            return (x * (x.square().mean(0) + 1e-6).rsqrt()).sin()

        layer = nn.Linear(128, 128)
        assert self.why(scaled, torch.randn(4, 8192, requires_grad=True)) == {None, "it is a statistic"}
        assert self.why(torch.sin, torch.randn(8, 100, requires_grad=True)) == {"it is small"}
        assert self.why(lambda x: layer(x).exp(), torch.randn(64, 128)) == {"the caller holds it"}

    def test_what_backward_compares(self) -> None:
        x, weight = torch.randn(64, 128), torch.randn(128, 128, requires_grad=True)
        for activation in (F.relu, F.leaky_relu, lambda h: h.clamp(-1, 1), torch.abs):

            def layer(x: Tensor, weight: Tensor, activation: Any = activation) -> Tensor:
                return activation(x @ weight) * 3.0

            assert torch.equal(*int8_and_exact(layer, x, weight, of=weight))

    def test_whole_numbers(self) -> None:
        table, places = torch.randn(100, 8, requires_grad=True), torch.randint(100, (8192,))
        saved = explain(lambda table: table[places].sum(), table, backend="eager", compress="int8").saved
        assert [value.why_exact for value in saved if value.dtype == "int64"] == ["it holds no floats"]


def test_unknown_names_are_refused() -> None:
    text = "no compression 'int4'; did you mean 'int8'? there are: bfloat16, float8, int8"
    for make in (
        lambda: fuse(torch.sin, compress="int4"),
        lambda: SavePolicy("min_cut", compress="int4"),
        lambda: explain(torch.sin, torch.randn(3, requires_grad=True), compress="int4"),
    ):
        with pytest.raises(ValueError, match=text.replace("?", r"\?")):
            make()
