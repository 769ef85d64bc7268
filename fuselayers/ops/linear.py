"""linear -- y = x weight^T + bias, by the faster of the two libraries of matrix products that torch carries.

    x, y     [..., K], [..., N]   any float dtype
    weight   [N, K]
    bias     [N] or None

    dx = dy weight      dweight = dy^T x      dbias = sum over rows of dy

Saved for backward: x if the weight needs a gradient, the weight if x needs one; as `F.linear` saves them.

Note: [oneDNN on an AMD processor] In float32 torch calls MKL, which on a processor of AMD takes its AVX2 code even
where there is AVX-512. oneDNN takes AVX-512, which has twice the arithmetic since Zen 5. GFLOP/s of one core (AMD EPYC,
Zen 5, torch 2.13), MKL / oneDNN:

    rows, K, N        forward      dx           dweight
    1024, 128, 512    110 / 244    109 / 253    100 / 184
    2048, 512, 2048   110 / 247    110 / 233    105 / 196
    64, 64, 64         73 / 37      83 / 38      75 / 30     too small: see `is_faster_in_onednn`

The core's peak is some 260. oneDNN adds in another order: its root mean square error is 1.7 times that of MKL over 512
to 1,024 terms, at most 2.3 times over 2,048, and 1.9 times over 16,384. torch has no op that calls oneDNN for float32
matrices in batches (`bmm`).
"""

import functools
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._torch.dispatch import PLAIN_TENSORS, is_batched_gradient, is_intercepted, jit_is_tracing
from .._torch.inductor import product_in_inductor
from .._torch.onednn import allows_onednn, has_fast_layout, has_onednn, is_cheaper_transposed, onednn_product
from ..hardware import processor_is_zen_5
from .cpu import has_kernels, rows, run
from .implementations import define, in_cpp, needs_grad

__all__ = ["is_faster_in_onednn", "linear", "onednn_wins", "product", "takes_onednn"]

# Measured over 170 shapes. A call of oneDNN takes 12 us, one of MKL 1 us.
_LEAST_FLOPS: Final = 1 << 22
# An autograd function in Python takes 40 us for both directions.
_LEAST_FLOPS_RECORDED: Final = 1 << 24
_LEAST_RESULT: Final = 1 << 12  # elements: MKL is the faster one for [4096, 2] at any inner size
_LEAST_SIZE: Final = 4


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, by oneDNN where that is faster: in float32, AVX-512, AMD since Zen 5.

    The choice depends on the machine, the shapes and torch's settings, never on a measurement. `F.linear` runs inside
    a compiler (`fuse` has a pass for products), a transform of `torch.func` and autocast, for tensor subclasses, small
    products and weights with gaps between their rows, and where `torch.backends.mkldnn` is disabled, deterministic or
    set to a lower precision.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N], or None.

    Raises:
        RuntimeError: the shapes or dtypes do not fit each other; the text is torch's.

    >>> linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)).tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    if not _takes_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    x_RK = x.reshape(-1, x.shape[-1])
    if needs_grad(x, weight, bias):
        y_RN: Tensor = _Linear.apply(x_RK, weight.t(), bias)  # type: ignore[no-untyped-call]
    else:
        y_RN = _onednn_product(x_RK, weight.t(), bias)
    # The view is made here, since a view that a custom function returns cannot be written into.
    return y_RN if x.dim() == 2 else y_RN.view(*x.shape[:-1], y_RN.shape[-1])


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a @ b, by the rule of `linear`. For code that autograd does not record, such as backwards."""
    return _onednn_product(a_MK, b_KN) if takes_onednn(a_MK, b_KN) else a_MK @ b_KN


def takes_onednn(a_MK: Tensor, b_KN: Tensor, *, least_flops: int = _LEAST_FLOPS) -> bool:
    """Return whether `product` calls oneDNN. Used also where a product's result would have to be copied."""
    if is_intercepted() or not _are_plain(a_MK, b_KN) or not onednn_wins():
        return False
    if is_batched_gradient(a_MK) or is_batched_gradient(b_KN) or not has_fast_layout(b_KN):
        return False
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    return is_faster_in_onednn(rows, inner, columns, least_flops=least_flops)


def is_faster_in_onednn(rows: int, inner: int, columns: int, *, least_flops: int = _LEAST_FLOPS) -> bool:
    """Return whether oneDNN multiplies [rows, inner] by [inner, columns] faster than MKL, where `onednn_wins`.

    >>> is_faster_in_onednn(1024, 128, 512), is_faster_in_onednn(64, 64, 64)
    (True, False)
    """
    return (
        2 * rows * inner * columns >= least_flops
        and rows * columns >= _LEAST_RESULT
        and min(rows, inner, columns) >= _LEAST_SIZE
    )


def onednn_wins() -> bool:
    """Return whether this machine multiplies large float32 matrices faster by oneDNN, and torch's settings allow it."""
    return _machine_prefers_onednn() and allows_onednn()


@functools.cache
def _machine_prefers_onednn() -> bool:
    # With AVX2 alone oneDNN gains 8 to 15 % on the one processor that was measured: too little for a rule. Zen 4 has no
    # more arithmetic with AVX-512 than with AVX2. torch can be built with another library in MKL's place, such as
    # OpenBLAS, which has AVX-512 code for AMD.
    has_both = has_onednn() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_both and processor_is_zen_5() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _takes_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # A compiler must not trace the rest. Then the test that most calls fail: a token takes 1 us more, not 4.
    if is_intercepted() or not _are_plain(x, weight) or x.dim() < 2 or weight.dim() != 2 or not x.shape[-1]:
        return False
    sizes = x.numel() // x.shape[-1], x.shape[-1], weight.shape[0]
    records = needs_grad(x, weight, bias)
    if not is_faster_in_onednn(*sizes, least_flops=_LEAST_FLOPS_RECORDED if records else _LEAST_FLOPS):
        return False
    if not onednn_wins() or torch.is_autocast_enabled("cpu") or jit_is_tracing() or x.shape[-1] != weight.shape[1]:
        return False  # torch raises for sizes that do not fit
    if not has_fast_layout(weight):
        return False
    return bias is None or (_are_plain(bias) and bias.is_contiguous() and bias.shape == weight.shape[:1])


def _onednn_product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return a @ b + bias. The bias must be contiguous.

    oneDNN reads `b` in place; see `has_fast_layout`. torch copies an `a` that is not contiguous, such as the dy^T of a
    weight's gradient, on one thread: this copy took half of the time on two threads.
    """
    if bias_N is None and is_cheaper_transposed(a_MK, b_KN):
        return _contiguous(onednn_product(_contiguous(b_KN.t()), a_MK.t(), None).t())
    return onednn_product(_contiguous(a_MK), b_KN, bias_N)


def _contiguous(x_MN: Tensor) -> Tensor:
    if x_MN.is_contiguous() or x_MN.stride(0) != 1 or not (in_cpp(x_MN) and has_kernels()):
        return x_MN.contiguous()
    copied = x_MN.new_empty(x_MN.shape)
    run("transpose", rows(x_MN.t()), rows(copied), x_MN.shape[1], x_MN.shape[0])
    return copied


def _are_plain(*tensors: Tensor) -> bool:
    return all(
        type(tensor) in PLAIN_TENSORS
        and tensor.is_cpu
        and tensor.dtype == torch.float32
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_neg())  # the kernel that transposes reads the memory as it is
        for tensor in tensors
    )


class _Linear(torch.autograd.Function):
    # The weight comes transposed, as `F.linear` saves it: a checkpoint compares what forward and its repetition save.
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_KN: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_RK if wants_weight else None, weight_KN if wants_x else None)
        ctx.by_rows = weight_KN.stride(0) == 1
        return _onednn_product(x_RK, weight_KN, bias)

    @staticmethod
    def backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
        x_RK, weight_KN = ctx.saved_tensors
        # Under create_graph autograd records this backward, and can differentiate torch's product only.
        multiply = torch.matmul if torch.is_grad_enabled() else product
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dweight_KN = None
        if wants_weight:  # autograd would copy a gradient whose layout is not the weight's
            dweight_KN = multiply(dy_RN.t(), x_RK).t() if ctx.by_rows else multiply(x_RK.t(), dy_RN)
        return multiply(dy_RN, weight_KN.t()) if wants_x else None, dweight_KN, dy_RN.sum(0) if wants_bias else None


def _run_product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    return _onednn_product(a_MK, b_KN, None if bias_N is None else bias_N.contiguous())


def _empty_product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    product_in_inductor(PRODUCT_OP)
    return a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])


PRODUCT_OP: Any = define(
    "onednn_product(Tensor a, Tensor b, Tensor? bias) -> Tensor", _run_product, _empty_product, keys=["CPU"]
)
"""a @ b + bias by oneDNN, as a node of a graph. The fusion core puts it there after the cut, so it has no gradient."""


@register_flop_formula(torch.ops.fuselayers.onednn_product)
def _product_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])
