import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.attention import kernels
from fuselayers.partition import saved_bytes
from fuselayers.testing import (
    assert_as_good_as,
    check_double_backward,
    check_fused,
    check_layouts,
    check_not_finite,
    check_poisoned,
    check_single_gradients,
    check_transforms,
)
from fuselayers.testing.comparison import cast, results
from tests.ops.attention.cases import CASES, DROPPING, Case
from tests.ops.contract import DEVICE, on_cpp, on_kernels, on_triton, tensors

# In Triton's interpreter a case takes 0.1 to 8 s.
INTERPRETED_EVERY_DAY = (
    *("one key", "shared keys", "narrow values", "window of one", "soft cap and bias", "one bias of all heads"),
    *("sinks and queries without keys", "a bias of keys", "mask of heads", "dropout of a shard"),
    *("distances of one key", "distances and dropout"),
)


def with_backends(*backends: Any, names: Iterable[str] = CASES) -> Any:
    """Each case with each backend; with Triton few every day."""
    return pytest.mark.parametrize(
        ("case", "backend"),
        [
            pytest.param(CASES[name], backend, id=f"{backend}-{name}", marks=marks)
            for name in names
            for backend, *marks in backends
        ]
        + [
            pytest.param(CASES[name], "triton", id=f"triton-{name}", marks=marks)
            for name in names
            for marks in [[on_kernels] if name in INTERPRETED_EVERY_DAY else [on_kernels, pytest.mark.slow]]
        ],
    )


CPP = ("cpp", *on_cpp.marks)
every_backend = pytest.mark.parametrize("backend", ["eager", on_cpp, on_triton])
every_kernel = pytest.mark.parametrize("backend", [on_cpp, on_triton])
# All inputs and a mask; and the calls that torch's own kernel takes.
few_with_backends = with_backends(
    ("eager",), CPP, names=("all rules", "sinks", "bias", "soft cap and bias", "distances")
)


every_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@every_case
@pytest.mark.parametrize(
    ("backend", "dtype"), [("eager", torch.float32), ("eager", torch.float64), ("auto", torch.float64)]
)
def test_the_formula_matches_the_reference(case: Case, backend: str, dtype: torch.dtype) -> None:
    assert_as_good_as(*case.forms(backend), case.inputs(dtype))


@with_backends(CPP)
def test_the_kernels_match_the_reference(case: Case, backend: str) -> None:
    assert_as_good_as(*case.forms(backend), case.inputs())


@with_backends(CPP)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(case: Case, backend: str, dtype: torch.dtype) -> None:
    """As a whole, not element by element: backward reads y, whose rounding differs from that of the weights."""
    form, reference = case.forms(backend)
    inputs = case.inputs(dtype)
    exact, plain = results(reference, cast(inputs, torch.float64)), results(reference, inputs)
    for name, got in results(form, inputs).items():
        assert got.dtype == dtype
        error, own = ((value.double() - exact[name]).norm() for value in (got, plain[name]))
        assert error <= 2 * own + torch.finfo(dtype).eps / 2 * exact[name].norm(), name


@few_with_backends
@pytest.mark.parametrize("check", [check_layouts, check_single_gradients, check_poisoned])
def test_contract(check: Callable[..., Any], case: Case, backend: str) -> None:
    assert check(*case.forms(backend), case.inputs()) is None


@few_with_backends
def test_second_derivatives(case: Case, backend: str) -> None:
    assert check_double_backward(*case.forms(backend), case.inputs()) is None


@few_with_backends
def test_autocast_casts_queries_keys_and_values(case: Case, backend: str) -> None:
    form, _ = case.forms(backend)
    q, k, v, *rest = case.inputs()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = form(q, k, v, *rest)
    torch.testing.assert_close(y, form(q.bfloat16(), k.bfloat16(), v.bfloat16(), *rest), rtol=0.05, atol=0.05)


@every_backend
def test_transforms(backend: str) -> None:
    case = CASES["dropout of odd keys"]
    said = check_transforms(*case.forms(backend), case.inputs())
    assert said is None if backend == "eager" else f"backend '{backend}' cannot take this call" in str(said)


@every_backend
def test_not_finite(backend: str) -> None:
    case = Case((2, 2, 20, 16))
    check_not_finite(*case.forms(backend), case.inputs())


@few_with_backends
def test_fused(case: Case, backend: str) -> None:
    check_fused(*case.forms(backend), case.inputs(), backend="eager")


@pytest.mark.parametrize("tokens", [7, 70])
def test_forward_mode(tokens: int) -> None:
    """Torch's attention has no derivative there."""
    form, reference = Case((2, 4, tokens, 16), options={"causal": True}).forms("auto")
    q, k, v, tangent = tensors(*[(2, 4, tokens, 16)] * 4)
    _, got = torch.func.jvp(lambda q: form(q, k, v), (q,), (tangent,))
    _, expected = torch.func.jvp(lambda q: reference(q, k, v), (q,), (tangent,))
    torch.testing.assert_close(got, expected)


def test_gradcheck() -> None:
    case = Case((1, 2, 3, 2), (1, 4), bias=(2, 3, 4), sinks=True, options={"soft_cap": 2.0, "causal": True, "first": 1})
    inputs = [value.requires_grad_() for value in case.inputs(torch.float64)]
    assert torch.autograd.gradcheck(case.forms("auto")[0], inputs)


@every_backend
def test_is_torch_s_attention(backend: str) -> None:
    q, k, v = tensors((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ops.attention(q, k, v, causal=True, backend=backend), expected)


@every_kernel
def test_every_bit_of_the_mask(backend: str) -> None:
    """Read back from forward through one-hot values, and from backward through one-hot gradients."""
    batch, heads, tokens, keys, p = 2, 2, 70, 90, 0.3
    seed = torch.tensor(-(2**45) + 99, device=DEVICE)
    keep = ops.keep_mask(seed, (batch, heads, tokens, keys), p=p)
    q, k = (torch.zeros(batch, heads, size, 16, device=DEVICE) for size in (tokens, keys))
    each_key, each_query = (torch.eye(size, device=DEVICE).expand(batch, heads, -1, -1) for size in (keys, tokens))
    form = partial(ops.attention, q, k, p=p, seed=seed, backend=backend)
    assert torch.equal(form(each_key) > 0, keep)
    v = torch.zeros(batch, heads, keys, tokens, device=DEVICE, requires_grad=True)
    (dv,) = torch.autograd.grad(form(v), v, each_query)
    assert torch.equal(dv.mT > 0, keep)


@pytest.mark.parametrize("backend", [on_cpp])
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"bias": (4, 300, 1100)}, {"bias": (1, 1, 300, 1100)}),
        {"distances": True, "q": (1, 4, 300, 16), "k": (1, 1100)},  # whose two chunks of keys run at the same time
    ],
    ids=str,
)
def test_the_number_of_threads_changes_nothing(backend: str, changes: dict[str, Any]) -> None:
    options = {**CASES["dropout"].options, "first": 800}
    case = replace(Case((2, 4, 300, 16), (2, 1100), options=options), **changes)
    form, _ = case.forms(backend)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            runs.append(results(form, case.inputs()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(run[name], value) for run in runs[1:] for name, value in runs[0].items())


@every_kernel
def test_a_shard_within_a_group_of_columns(backend: str) -> None:
    """The kernels draw the mask for eight columns at a time."""
    shard = ops.Shard((0, 0, 0, 4), (2, 3, 33, 37))
    case = Case((2, 3, 33, 16), options={**CASES["dropout"].options, "causal": False, "shard": shard})
    form, _ = case.forms(backend)
    reason = "its shard begins at column 4, which is not a multiple of 8; use backend='auto' or 'eager'"
    with pytest.raises(RuntimeError, match=f"^backend '{backend}' cannot take this call: {reason}$"):
        form(*case.inputs())
    assert_as_good_as(*case.forms("auto"), case.inputs())


@every_kernel
def test_heads_too_wide_for_the_shared_memory_of_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "shared_memory", lambda device: 163 << 10)  # an A100's
    for width, fits in ((128, True), (129, backend == "cpp")):
        for case in (Case((1, 1, 16, width)), Case((1, 1, 16, 8), width=width)):
            form, reference = case.forms(backend)
            if fits:
                assert_as_good_as(form, reference, case.inputs())
                continue
            reason = "its heads have more than the 128 channels that fit in this GPU's shared memory in torch.float32"
            with pytest.raises(RuntimeError, match=f"^backend 'triton' cannot take this call: {reason}; use backend"):
                form(*case.inputs())


@every_kernel
def test_heads_of_a_packed_projection_are_read_in_place(backend: str) -> None:
    packed = torch.randn(2, 40, 12, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()

    def attend(backend: str) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in packed.split((6, 3, 3), dim=2))
        return ops.attention(q, k, v, causal=True, backend=backend)

    y = attend(backend)
    torch.testing.assert_close(y, attend("eager"))
    assert y.transpose(1, 2).is_contiguous()  # as the next projection reads it
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), packed), torch.autograd.grad(attend("eager").square().sum(), packed)
    )


@pytest.mark.parametrize("backend", [on_cpp])
def test_a_compiled_call_takes_a_permuted_table_of_distances(backend: str) -> None:
    """A table [T + S - 1, H], as an embedding of distances gives it."""
    case = Case((2, 4, 33, 16), bias=(65, 4))
    q, k, v, table = case.inputs()

    def permuted(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return ops.attention(q, k, v, distance_bias=table.T, backend=backend)

    compiled = results(torch.compile(permuted, fullgraph=True), (q, k, v, table))
    for name, value in results(permuted, (q, k, v, table)).items():
        torch.testing.assert_close(compiled[name], value, msg=name)


@pytest.mark.parametrize("backend", [on_cpp])
def test_a_compiled_call_takes_a_permuted_bias(backend: str) -> None:
    """A table [T, S, H] of relative positions; compiled code reads the gradient with the strides that it was told."""
    case = Case((2, 4, 33, 16), bias=(33, 33, 4))
    form, _ = case.forms(backend)

    def permuted(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return form(q, k, v, table.permute(2, 0, 1))

    for name, value in results(torch.compile(permuted, fullgraph=True), case.inputs()).items():
        torch.testing.assert_close(value, results(permuted, case.inputs())[name], msg=name)


@every_kernel
def test_saved_tensors_may_come_back_with_other_strides(backend: str) -> None:
    """As from a hook that compresses them, or moves them elsewhere."""
    form, reference = CASES["bias"].forms(backend)

    def hooked(*inputs: Tensor) -> Tensor:
        def packed(x: Tensor) -> Tensor:
            return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
            return form(*inputs)

    assert_as_good_as(hooked, reference, CASES["bias"].inputs())


@every_kernel
def test_saves_no_weights(backend: str) -> None:
    """Saved: q, k, v, y, a number for each query, and a seed."""
    q, k, v = (x.requires_grad_() for x in tensors((2, 4, 90, 16), (2, 2, 130, 16), (2, 2, 130, 16)))
    elements = q.numel() + k.numel() + v.numel() + q.numel() + 2 * 4 * 90
    call = partial(ops.attention, p=0.1, causal=True, backend=backend)
    assert saved_bytes(call, q, k, v) == 4 * elements + 8
    (table,) = (x.requires_grad_() for x in tensors((4, 90 + 130 - 1)))
    assert saved_bytes(partial(call, distance_bias=table), q, k, v) == 4 * (elements + table.numel()) + 8


@pytest.mark.parametrize("backend", [on_cpp])
@pytest.mark.parametrize(("groups", "bias"), [(1, None), (8, (1, 1, 1, 8192))], ids=str)
def test_backward_s_memory_where_heads_share(backend: str, groups: int, bias: tuple[int, ...] | None) -> None:
    """Tasks of backward sum a float32 dq each; of 8 heads there are at most four."""
    case = Case((1, 8, 1024, 16), (groups, 8192), bias=bias)
    form, _ = case.forms(backend)
    inputs = [x.requires_grad_() for x in case.inputs()]
    y = form(*inputs)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.autograd.grad(y.sum(), inputs[:1] if bias is None else inputs[::3])
    largest = max(event.self_cpu_memory_usage for event in profile.events() if event.name == "aten::empty")
    assert largest <= max(4 * inputs[0].nbytes, inputs[1].nbytes)


@every_kernel
def test_hidden_keys_may_be_anything(backend: str) -> None:
    """A hidden key may be NaN, whether its block is skipped or not. A hidden value is multiplied by 0, as in torch."""
    q, k, v = tensors((1, 2, 20, 16), (1, 2, 300, 16), (1, 2, 300, 16))
    seen = torch.arange(300, device=DEVICE) < 20
    expected = ops.attention(q, k[:, :, :20], v[:, :, :20], backend=backend)
    k[:, :, 20:] = torch.nan
    torch.testing.assert_close(ops.attention(q, k, v, key_padding_mask=seen[None], backend=backend), expected)


@every_backend
@pytest.mark.parametrize("others", [{}, {"soft_cap": 5.0}, DROPPING, {"sinks": -torch.inf}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_the_bias_hides(backend: str, others: dict[str, Any], dtype: torch.dtype) -> None:
    """Its result is zero, and so are its gradients."""
    if dtype == torch.float64:
        backend = "eager" if backend == "eager" else "auto"  # which takes torch's attention, or the formula
    case = Case((1, 2, 20, 16), bias=(20, 20), options={name: others[name] for name in others if name != "sinks"})
    q, k, v, bias = case.inputs(dtype)
    bias[5] = -torch.inf
    more = [torch.full((2,), -torch.inf, dtype=dtype, device=DEVICE)] if "sinks" in others else []
    form, reference = replace(case, sinks=bool(more)).forms(backend)
    inputs = [q, k, v, bias, *more]
    assert_as_good_as(form, reference, inputs)
    q, bias = q.requires_grad_(), bias.requires_grad_()
    y = form(q, k, v, bias, *more)
    gradients = torch.autograd.grad(y.square().sum(), (q, bias))
    assert not any(x[..., 5, :].any() for x in (y, *gradients))


@every_backend
def test_the_lowest_bias_and_another_rule(backend: str) -> None:
    """The keys that the rule hides stay hidden where the bias is the lowest for all others."""
    case = Case((1, 2, 20, 16), bias=(20,), options={"causal": True})
    q, k, v, bias = case.inputs()
    bias[:7] = torch.finfo(torch.float32).min
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        form, reference = case.forms(backend)
        exact = reference(q.double(), k.double(), v.double(), bias)
        y = form(q.to(dtype), k.to(dtype), v.to(dtype), bias)
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("tokens", [7, 20])
def test_the_lowest_bias_in_16_bits(tokens: int) -> None:
    """Also where torch's attention takes the call: the number does not become -inf, which would hide the keys."""
    q, k, v = (x.bfloat16() for x in tensors((1, 2, tokens, 16), (1, 2, 30, 16), (1, 2, 30, 16)))
    bias = torch.full((tokens, 30), torch.finfo(torch.float32).min, device=DEVICE)
    torch.testing.assert_close(ops.attention(q, k, v, bias=bias), v.mean(2, keepdim=True).expand_as(q))


@every_kernel
def test_the_lowest_bias_hides_nothing_by_itself(backend: str) -> None:
    """Models write masks with the lowest number; where a whole row has it, torch's weights are even."""
    q, k, v = tensors((1, 2, 20, 16), (1, 2, 30, 16), (1, 2, 30, 16))
    bias = torch.zeros(20, 30, device=DEVICE)
    bias[:, 7:] = torch.finfo(torch.float32).min
    bias[5] = torch.finfo(torch.float32).min
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(ops.attention(q, k, v, bias=bias, backend=backend), expected)
    bias[5] = -torch.inf
    assert not ops.attention(q, k, v, bias=bias, backend=backend)[:, :, 5].any()


@every_kernel
@pytest.mark.parametrize("lowest", [-1e4, torch.finfo(torch.float16).min, -1e9, torch.finfo(torch.float32).min])
def test_gradients_of_a_row_with_the_lowest_bias(backend: str, lowest: float) -> None:
    """Backward reads the logarithm of a row's sum, of which such a bias leaves few digits or none."""
    values = tensors((1, 2, 20, 16), (1, 2, 30, 16), (1, 2, 30, 16))
    bias, dy = torch.full((20, 30), lowest, device=DEVICE), torch.randn((1, 2, 20, 16), device=DEVICE)

    def gradients(backend: str) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (*values, bias)]
        y = ops.attention(*leaves[:3], bias=leaves[3], backend=backend)
        return torch.autograd.grad(y, leaves, dy)

    torch.testing.assert_close(gradients(backend), gradients("eager"), rtol=0.01, atol=0.01)


@every_backend
def test_evaluation_drops_nothing(backend: str) -> None:
    q, k, v = tensors((1, 1, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8))
    call = partial(ops.attention, q, k, v, backend=backend)
    assert all(torch.equal(call(p=p, training=False), call()) for p in (0.5, 1.0))
    torch.manual_seed(0)
    first = call(p=0.5)
    torch.manual_seed(0)
    assert torch.equal(call(p=0.5), first)
    assert not torch.equal(call(p=0.5), first)


HEADS = (2, 4, 3, 8)
KEYS = (2, 2, 5, 8)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "three dimensions": ({"q": torch.ones(4, 3, 8)}, r"q must be \[batch, heads, tokens, channels\], got \[4, 3, 8\]"),
    "dtype": ({"k": torch.ones(KEYS).half()}, "k must have q's dtype torch.float32, got torch.float16; convert it"),
    "channels": ({"k": torch.ones(2, 2, 5, 7)}, r"k must be \[2, heads, keys, 8\] to fit q \[2, 4, 3, 8\], got"),
    "no channels": ({"q": torch.ones(2, 4, 3, 0), "k": torch.ones(2, 2, 5, 0)}, "q must have at least one channel"),
    "values": ({"v": torch.ones(2, 2, 6, 8)}, r"v must be \[2, 2, 5\] and channels to fit k \[2, 2, 5, 8\], got"),
    "heads": ({"q": torch.ones(2, 3, 3, 8)}, "q's heads must be a multiple of k's, at least one, got 3 and 2"),
    "no heads": ({"q": torch.ones(2, 0, 3, 8)}, "q's heads must be a multiple of k's, at least one, got 0 and 2"),
    "device": ({"v": torch.ones(KEYS, device="meta")}, "v must be on q's device cpu, got meta; move it"),
    "scale": ({"scale": math.nan}, r"scale must be finite, or None for 1 / sqrt\(channels\), got nan"),
    "window": ({"window": 0}, "window must be a whole number of at least 1, or None for all keys, got 0"),
    "half a key": ({"window": 2.5}, "window must be a whole number of at least 1, or None for all keys, got 2.5"),
    "first": ({"first": -1}, r"first must be a whole number of at least 0 and less than 2\^31, got -1"),
    "half a first": ({"first": 1.5}, r"first must be a whole number of at least 0 and less than 2\^31, got 1.5"),
    "a distant first": ({"first": 1 << 31}, r"first must be a whole number of at least 0 .*, got 2147483648"),
    "soft cap": ({"soft_cap": 0.0}, "soft_cap must be above 0 and finite, or None for no cap, got 0.0"),
    "no soft cap": ({"soft_cap": math.inf}, "soft_cap must be above 0 and finite, or None for no cap, got inf"),
    "sinks": ({"sinks": torch.ones(2)}, r"sinks must be \[4\], one for each query head, got \[2\]"),
    "bias": ({"bias": torch.ones(2, 3, 5)}, r"bias must be broadcastable to \[2, 4, 3, 5\], got \[2, 3, 5\]"),
    "distances": (
        {"distance_bias": torch.ones(4, 8)},
        r"distance_bias must be \[4, 7\], for each head the distances of 3 queries and 5 keys, got \[4, 8\]",
    ),
    "two biases": (
        {"bias": torch.ones(5), "distance_bias": torch.ones(4, 7)},
        r"attention takes a bias or a distance_bias, got both; add distance_bias.unfold\(-1, keys, 1\).flip\(-2\) to",
    ),
    "mask": ({"mask": torch.ones(3, 5)}, "mask must be torch.bool, True where a query may look at a key, got"),
    "padding": ({"key_padding_mask": torch.ones(2, 3) > 0}, r"key_padding_mask must be torch.bool \[2, 5\], True for"),
    "documents": ({"documents": torch.ones(2, 5)}, r"documents must be integers \[2, 5\], the number of each key's"),
    "documents of queries": (
        {"documents": torch.ones(2, 5).int(), "first": 3},
        "documents need a key for each query, got 3 queries from 3 on, and 5 keys",
    ),
    "probability": ({"p": 2.0}, "dropout probability p must satisfy 0 <= p <= 1, got 2.0"),
    "shard": ({"shard": ops.Shard((0, 0), (9, 9))}, r"a tensor \[2, 4, 3, 5\] that starts at \[0, 0\] does not fit"),
    "backend": ({"backend": "cuda"}, "no backend 'cuda'"),
}


@pytest.mark.parametrize(("arguments", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match=f"^{text}"):
            ops.attention(**{"q": torch.ones(HEADS), "k": torch.ones(KEYS), "v": torch.ones(KEYS), **arguments})
