"""`ops.linear` on a machine that prefers oneDNN, and on one that does not."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fuselayers import ops, testing
from fuselayers._torch.onednn import has_onednn
from fuselayers.hardware import processor_is_zen_5
from fuselayers.ops.linear import PRODUCT_OP, is_faster_in_onednn, linear, product
from fuselayers.partition import saved_bytes

linear_module: Any = sys.modules["fuselayers.ops.linear"]


@pytest.fixture
def prefers_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A machine that prefers oneDNN, whatever this one is; the list gets the sizes of each of its products."""
    if not has_onednn():
        pytest.skip("this torch has no oneDNN")
    calls: list[tuple[int, ...]] = []
    run = linear_module.onednn_product

    def counted(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        calls.append((*a.shape, b.shape[1]))
        y: Tensor = run(a, b, bias)
        return y

    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: True)
    monkeypatch.setattr(linear_module, "onednn_product", counted)
    return calls


def inputs(*shape: int, width: int = 192, bias: bool = True, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    made = [torch.randn(*shape, **options), torch.randn(width, shape[-1], **options), torch.randn(width, **options)]
    return [tensor.requires_grad_() for tensor in made[: 2 + bias]] + [None] * (not bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(400, 131), (4, 100, 131)])
def test_values_and_gradients(prefers_onednn: list[Any], shape: tuple[int, ...], bias: bool) -> None:
    tensors = [tensor for tensor in inputs(*shape, bias=bias) if tensor is not None]
    testing.assert_as_good_as(linear, F.linear, tensors)
    assert (400, 131, 192) in prefers_onednn  # forward
    assert (400, 192, 131) in prefers_onednn  # the gradient of x
    assert (192, 400, 131) in prefers_onednn  # the gradient of the weight


def test_strided_inputs(prefers_onednn: list[Any]) -> None:
    packed = torch.randn(400, 3, 128)
    weight = torch.randn(128, 192).t()
    x = packed[:, 1]
    y = linear(x, weight)
    testing.assert_as_good_as(linear, F.linear, [x, weight])
    torch.testing.assert_close(y, F.linear(x, weight), rtol=1e-4, atol=1e-4)
    assert prefers_onednn


@pytest.mark.parametrize("layout", ["a part of wider rows", "rows that overlap"])
def test_layouts_that_onednn_does_not_sum_over(prefers_onednn: list[Any], layout: str) -> None:
    # As the second factor of dweight it would take 200 times as long as in MKL, or raise.
    x = torch.randn(400, 384)[:, 128:256] if layout == "a part of wider rows" else torch.randn(528).unfold(0, 128, 1)
    x, weight = x[:400].requires_grad_(), torch.randn(192, 128, requires_grad=True)
    got, wanted = (torch.autograd.grad(fn(x, weight).sin().sum(), [x, weight]) for fn in (linear, F.linear))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert prefers_onednn == [(400, 128, 192), (400, 192, 128)]  # forward and dx


def test_a_wide_gradient_is_not_copied(prefers_onednn: list[Any]) -> None:
    x, weight, _ = inputs(400, 72, width=512)
    testing.assert_as_good_as(linear, F.linear, [x, weight])
    assert (72, 400, 512) in prefers_onednn  # x^T dy, and not dy^T x, for which dy would be copied
    linear(x, weight).sin().sum().backward()
    assert weight.grad.is_contiguous()


def test_a_part_of_a_weight_goes_to_torch(prefers_onednn: list[Any]) -> None:
    x, wide = torch.randn(400, 128), torch.randn(192, 256)
    assert torch.equal(linear(x, wide[:, :128]), F.linear(x, wide[:, :128]))
    assert prefers_onednn == []


def test_the_negative_bit(prefers_onednn: list[Any]) -> None:
    x, weight, bias = inputs(400, 128)
    dy = torch.randn(400, 192)
    got, wanted = (
        torch.autograd.grad(fn(x, weight, bias), [x, weight, bias], incoming)
        for fn, incoming in ((linear, torch._neg_view(-dy)), (F.linear, dy))
    )
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", ["x", "weight", None])
def test_saves_what_torch_saves(prefers_onednn: list[Any], frozen: str | None) -> None:
    x, weight, bias = inputs(400, 128)
    for name, tensor in (("x", x), ("weight", weight)):
        tensor.requires_grad_(name != frozen)
    assert saved_bytes(linear, x, weight, bias) == saved_bytes(F.linear, x, weight, bias)
    h = x * 1
    y = linear(h, weight, bias)
    assert prefers_onednn
    if frozen == "weight":
        h += 1  # h is not saved
        y.sum().backward()


def test_a_checkpoint_may_repeat_a_call_by_the_other_library(prefers_onednn: list[Any]) -> None:
    x, weight, bias = inputs(400, 128)
    with torch.backends.mkldnn.flags(enabled=False):
        y = checkpoint(lambda x: linear(x, weight, bias).sin(), x, use_reentrant=False)
    y.sum().backward()
    assert prefers_onednn


def test_the_gradient_of_a_weight_has_its_layout(prefers_onednn: list[Any]) -> None:
    for weight in (torch.randn(192, 128), torch.randn(128, 192).t()):
        weight.requires_grad_()
        (dweight,) = torch.autograd.grad(linear(torch.randn(400, 128), weight).sum(), weight)
        assert dweight.stride() == weight.stride()


@pytest.mark.parametrize("layout", ["sparse weight", "nested x"])
def test_other_layouts(prefers_onednn: list[Any], layout: str) -> None:
    x, weight = torch.randn(400, 128), torch.randn(192, 128)
    if layout == "nested x":
        nested = torch.nested.nested_tensor([x, x[:200]])
        torch.testing.assert_close(linear(nested, weight)[1], F.linear(x[:200], weight))
    else:
        sparse = weight.relu().to_sparse_csr()
        torch.testing.assert_close(linear(x, sparse), F.linear(x, sparse.to_dense()))
    assert prefers_onednn == []


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_wanted_gradients_are_computed(prefers_onednn: list[Any], wanted: tuple[bool, ...]) -> None:
    tensors = [tensor.detach().requires_grad_(want) for tensor, want in zip(inputs(400, 128), wanted, strict=True)]
    linear(*tensors).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == list(wanted)
    assert len(prefers_onednn) == (1 if wanted[2] else 2)


OTHERS = ("small", "float64", "bfloat16", "autocast", "disabled", "precision", "vmap", "a strided bias", "a subclass")


@pytest.mark.parametrize("why", [*OTHERS, "trace"])
def test_other_calls_go_to_torch(prefers_onednn: list[Any], why: str) -> None:
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(why, torch.float32)
    x, weight, bias = (tensor.detach() for tensor in inputs(400, 128, dtype=dtype))
    if why == "small":
        x = x[:3]
    if why == "a strided bias":
        bias = torch.randn(384)[::2]
    if why == "a subclass":

        class Own(Tensor):
            pass

        x = x.as_subclass(Own)
    torch_precision = torch.get_float32_matmul_precision()
    try:
        if why == "precision":
            torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", enabled=why == "autocast"), torch.backends.mkldnn.flags(enabled=why != "disabled"):
            call = {
                "vmap": lambda: torch.vmap(lambda row: linear(row, weight, bias))(x[None])[0],
                "trace": lambda: torch.jit.trace(lambda x: linear(x, weight, bias), x, check_trace=False)(x),
            }.get(why, lambda: linear(x, weight, bias))
            assert torch.equal(call(), F.linear(x, weight, bias))
    finally:
        torch.set_float32_matmul_precision(torch_precision)
    assert prefers_onednn == []


def test_a_machine_that_prefers_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: False)
    x, weight, bias = inputs(400, 128)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_the_rule_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = linear_module._machine_prefers_onednn.__wrapped__
    for zen_5, capability, mkl in itertools.product((False, True), ("AVX2", "AVX512"), (False, True)):
        monkeypatch.setattr(linear_module, "processor_is_zen_5", lambda zen_5=zen_5: zen_5)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda mkl=mkl: mkl)
        assert rule() == (zen_5 and capability == "AVX512" and mkl and has_onednn())


@pytest.mark.parametrize(
    ("vendor", "family", "is_zen_5"),
    [("AuthenticAMD", 26, True), ("AuthenticAMD", 25, False), ("GenuineIntel", 6, False)],
)
def test_the_generation_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, vendor: str, family: int, is_zen_5: bool
) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 2\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert processor_is_zen_5.__wrapped__() == is_zen_5


def test_sizes() -> None:
    assert is_faster_in_onednn(128, 128, 128)
    assert not is_faster_in_onednn(64, 128, 128)  # too few FLOPs
    assert not is_faster_in_onednn(4096, 512, 1)  # a narrow result
    assert not is_faster_in_onednn(32, 4096, 32)  # a small result
    assert not is_faster_in_onednn(1, 3072, 3072)  # one row: all of the weight is read for it
    assert not is_faster_in_onednn(3072, 1, 3072)


def test_second_derivatives_and_transforms(prefers_onednn: list[Any]) -> None:
    def penalty(fn: Any) -> list[Tensor]:
        x, weight, bias = inputs(400, 128)
        (dx,) = torch.autograd.grad(fn(x, weight, bias).sin().sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), [x, weight, bias]))

    for gradient, wanted in zip(penalty(linear), penalty(F.linear), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3)
    x, weight, bias = (tensor.detach() for tensor in inputs(400, 128))
    gradient = torch.func.grad(lambda w: linear(x, w, bias).sin().sum())(weight)
    torch.testing.assert_close(gradient, torch.func.grad(lambda w: F.linear(x, w, bias).sin().sum())(weight))
    tangent = torch.func.jvp(lambda x: linear(x, weight, bias), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, F.linear(torch.ones_like(x), weight))


def test_batched_gradients(prefers_onednn: list[Any]) -> None:
    x, weight, bias = inputs(400, 128)
    y = linear(x, weight, bias)
    seeds = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True)
    torch.testing.assert_close(batched, seeds @ weight, rtol=1e-4, atol=1e-4)


def test_a_result_may_be_written_into(prefers_onednn: list[Any]) -> None:
    x, weight, bias = inputs(4, 100, 128)
    y = linear(x, weight, bias)
    y += 1
    y.sum().backward()
    assert x.grad is not None


def test_errors_are_those_of_torch(prefers_onednn: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        linear(torch.ones(400, 128), torch.ones(192, 127))
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        linear(torch.ones(400, 128), torch.ones(192, 128, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="expanded size"):
        linear(torch.ones(400, 128), torch.ones(192, 128), torch.ones(191))


def test_without_rows_or_columns(prefers_onednn: list[Any]) -> None:
    for rows, inner, columns in ((0, 128, 192), (400, 0, 192), (400, 128, 0)):
        x, weight = torch.ones(rows, inner), torch.ones(columns, inner)
        assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_product(prefers_onednn: list[Any]) -> None:
    a, b = torch.randn(400, 128), torch.randn(128, 192)
    torch.testing.assert_close(product(a, b), a @ b, rtol=1e-4, atol=1e-4)
    assert prefers_onednn == [(400, 128, 192)]
    assert torch.equal(product(a[:2], b), a[:2] @ b)


def test_the_node_of_a_graph_counts_its_flops() -> None:
    a, b = torch.randn(400, 128), torch.randn(128, 192)
    torch.library.opcheck(PRODUCT_OP, (a, b, torch.randn(192)), test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        PRODUCT_OP(a, b, None)
    assert counter.get_total_flops() == 2 * 400 * 128 * 192


def test_it_is_exported_as_an_op() -> None:
    assert ops.linear is linear
