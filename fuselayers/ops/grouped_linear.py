"""grouped_linear -- rows in groups, each group through its own linear layer. Used by mixtures of experts.

    x, y      [R, D], [R, F]   R rows, sorted by group
    weights   E of [F, D]      E groups
    ends      [E]              int64: group e has the rows from ends[e - 1] to ends[e]; later rows give zeros

    y[r] = x[r] weights[e]^T    dx = grouped_linear(dy, weights^T)    dweights[e] = sum over its rows of dy[r]^T x[r]

All shapes are fixed, so compilers see two ops without sizes that depend on data. torch's own `grouped_mm` (2.13) does
not support float64, and supports fake tensors in bfloat16 only. On a GPU this op calls it for bfloat16, and the host
does not read `ends`. For other dtypes, and for rows that are not a multiple of 16 bytes, the host reads `ends` and
starts a matmul per group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .implementations import autocast_dtype, define
from .linear import product, takes_onednn

__all__ = ["grouped_linear"]


def grouped_linear(x_RD: Tensor, weights: Sequence[Tensor], ends_E: Tensor) -> Tensor:
    """Return the rows of each group times the transpose of its weight, [F, D]. Autocast applies as for `F.linear`.

    `ends` must not decrease and must not exceed R; this is not checked. The op does not support transforms of
    `torch.func` and forward mode: mixtures of experts call each expert there.
    """
    lower = autocast_dtype(x_RD.device)
    if lower is not None and x_RD.dtype != torch.float64:
        x_RD, weights = x_RD.to(lower), [weight.to(lower) for weight in weights]
    y_RF: Tensor = _product(x_RD, list(weights), ends_E, False)
    return y_RF


def _run_product(x_RD: Tensor, weights: list[Tensor], ends_E: Tensor, transposed: bool) -> Tensor:
    if _without_a_read(x_RD, weights[0]):
        weights_EFD = torch.stack(weights)
        y_RF = F.grouped_mm(x_RD, weights_EFD if transposed else weights_EFD.mT, offs=ends_E.int())
        beyond_R = torch.arange(len(x_RD), device=x_RD.device) >= ends_E[-1]
        return y_RF.masked_fill_(beyond_R[:, None], 0.0)
    y_RF = _empty_product(x_RD, weights, ends_E, transposed)
    first = 0
    for weight, end in zip(weights, ends_E.tolist(), strict=True):
        if end > first:
            _multiply(x_RD[first:end], weight if transposed else weight.mT, y_RF[first:end])
        first = end
    y_RF[first:].zero_()
    return y_RF


def _run_weight_gradients(dy_RF: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    if _without_a_read(dy_RF, x_RD):
        return F.grouped_mm(dy_RF.mT, x_RD, offs=ends_E.int())
    dweights_EFD = _empty_weight_gradients(dy_RF, x_RD, ends_E)
    first = 0
    for dweight_FD, end in zip(dweights_EFD, ends_E.tolist(), strict=True):
        _multiply(dy_RF[first:end].mT, x_RD[first:end], dweight_FD)
        first = end
    return dweights_EFD


def _multiply(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    if takes_onednn(a_MK, b_KN, least_flops=1 << 24):  # it cannot write into a tensor, so the result is copied
        out_MN.copy_(product(a_MK, b_KN))
    else:
        torch.mm(a_MK, b_KN, out=out_MN)


def _without_a_read(*factors: Tensor) -> bool:
    return all(
        factor.is_cuda and factor.dtype == torch.bfloat16 and factor.is_contiguous() and not factor.shape[-1] % 8
        for factor in factors
    )


def _empty_product(x_RD: Tensor, weights: list[Tensor], ends_E: Tensor, transposed: bool) -> Tensor:
    return x_RD.new_empty(len(x_RD), weights[0].shape[1 if transposed else 0])


def _empty_weight_gradients(dy_RF: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    return x_RD.new_empty(len(ends_E), dy_RF.shape[1], x_RD.shape[1])


def _save_for_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RD, weights, ends_E, ctx.transposed = inputs
    ctx.save_for_backward(x_RD, ends_E, *weights)


def _product_backward(ctx: Any, dy_RF: Tensor) -> tuple[Any, ...]:
    x_RD, ends_E, *weights = ctx.saved_tensors
    dx_RD = None
    dweights: list[Tensor | None] = [None] * len(weights)
    if ctx.needs_input_grad[0]:
        dx_RD = _product(dy_RF, weights, ends_E, not ctx.transposed)
    if any(ctx.needs_input_grad[1]):
        factors = (x_RD, dy_RF) if ctx.transposed else (dy_RF, x_RD)
        dweights = list(_weight_gradients(*factors, ends_E).unbind())
    return dx_RD, dweights, None, None


def _save_for_weight_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weight_gradients_backward(ctx: Any, ddweights_EFD: Tensor) -> tuple[Any, ...]:
    dy_RF, x_RD, ends_E = ctx.saved_tensors
    ddweights = list(ddweights_EFD.unbind())
    return _product(x_RD, ddweights, ends_E, False), _product(dy_RF, ddweights, ends_E, True), None


_READS = (torch.Tag.cudagraph_unsafe,)  # CUDA graphs end before an op whose host may read `ends`

_product = define(
    "grouped_linear(Tensor x, Tensor[] weights, Tensor ends, bool transposed) -> Tensor",
    _run_product,
    _empty_product,
    keys=["CompositeExplicitAutograd"],
    tags=_READS,
)
_weight_gradients = define(
    "grouped_linear_weight_gradients(Tensor dy, Tensor x, Tensor ends) -> Tensor",
    _run_weight_gradients,
    _empty_weight_gradients,
    keys=["CompositeExplicitAutograd"],
    tags=_READS,
)
torch.library.register_autograd("fuselayers::grouped_linear", _product_backward, setup_context=_save_for_product)
torch.library.register_autograd(
    "fuselayers::grouped_linear_weight_gradients", _weight_gradients_backward, setup_context=_save_for_weight_gradients
)


@register_flop_formula(torch.ops.fuselayers.grouped_linear)
def _product_flops(x: Any, weights: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return int(2 * x[0] * x[1] * out_shape[1])


@register_flop_formula(torch.ops.fuselayers.grouped_linear_weight_gradients)
def _weight_gradients_flops(dy: Any, x: Any, *_: Any, **__: Any) -> int:
    return int(2 * dy[0] * dy[1] * x[1])
