"""The call that all norm ops share: the formula, or the kernels with their gradients."""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ..._torch.dispatch import is_compiling
from ..dropout import dropout_formula
from ..implementations import Op, autocast_dtype, backward_takes_formula, differentiable, gradients_by_formula
from ..rows import LONGEST_ROW
from ..shards import Shard, check_shard, row_indices
from ..sums import sum_of_rows
from .backward import normalise_backward
from .formula import check_eps, norm_formula, s_is_x
from .forward import normalise_forward

_SMALL: Final = 1 << 21
"""Elements below which a GPU runs torch's own norm: in bfloat16 these kernels would save an H100 some 5 us in forward
and backward, and take the host 175 us more (AMD EPYC). GPU and host work at the same time."""

_Tensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


def normalise(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    seed: Tensor | None = None,
    shard: Shard | None = None,
    p: float = 0.0,
    eps: float,
    pre: bool = False,
    rms: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return (y, s) as `formula` defines them. The callers check all arguments but eps and the shard.

    Raises:
        ValueError, BackendUnavailableError, RuntimeError: as `implementations.Op`.
        TypeError, ValueError: as `check_eps` and `check_shard`.
    """
    check_eps(eps)
    if shard is not None:
        check_shard(shard, x.shape, whole_rows=True)
    row_R = None if seed is None else row_indices(shard, x.shape, device=x.device)
    tensors = x, residual, bias, weight, norm_bias, seed, row_R
    results: tuple[Tensor, Tensor] = _op(backend, tensors, (p, eps, pre, rms), **_conditions(tensors, rms=rms))
    return results


def rms_norm_saves_x_only(x: Tensor, weight: Tensor) -> bool:
    """Return whether `rms_norm` saves x and a number per row; the formula saves more. Used by `swap`."""
    tensors = x, None, None, weight, None, None, None
    if _op.takes_kernels("auto", tensors, **_conditions(tensors, rms=True)):
        return True
    return x.is_cuda and _is_one_kernel_of_torch(tensors)


def _conditions(tensors: _Tensors, *, rms: bool) -> dict[str, Any]:
    """Return the arguments of the op that decide between formula and kernels."""
    x, width, reason = tensors[0], tensors[0].shape[-1], None
    # Inside a compiler a condition on a size becomes a guard.
    if (x.is_cuda or not is_compiling()) and width > LONGEST_ROW:
        reason = f"its kernels take rows of at most {LONGEST_ROW} columns, got {width}"
    return {
        "torch_is_faster_below": _SMALL if _is_one_kernel_of_torch(tensors) else 0,
        "torch_is_as_fast": not rms,  # torch has one kernel for a layer norm, and none for an RMS norm
        "unsupported_reason": reason,
    }


def _is_one_kernel_of_torch(tensors: _Tensors) -> bool:
    """Return whether torch has one kernel for a call on a GPU."""
    x, residual, bias, weight, norm_bias, seed, _ = tensors
    return (
        (residual is None and bias is None and seed is None)
        and weight.dtype == x.dtype == (x if norm_bias is None else norm_bias).dtype
        and autocast_dtype(x.device) is None  # autocast would save a copy in float32
    )


def _formula(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    row_R: Tensor | None,
    p: float,
    eps: float,
    pre: bool,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    s = x if bias is None else x + bias
    s = s if seed is None else dropout_formula(s, seed, row_R, 0, p)
    if pre and residual is not None:
        return norm_formula(s, weight, norm_bias, eps=eps, rms=rms) + residual, s
    s = s if residual is None else s + residual
    return norm_formula(s, weight, norm_bias, eps=eps, rms=rms), s


def _fused(x: Tensor, residual: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    _, _, seed, _, _, _, pre, _ = rest
    y, s, *_ = _differentiable(x, residual, bias, *rest)
    return y, x if s_is_x(residual, bias, seed, pre) else s


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        norm_bias: Tensor | None,
        seed: Tensor | None,
        row_R: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        _, _, pre, _ = ctx.options = options
        y, s, mean, rstd = normalise_forward(x, residual, bias, weight, norm_bias, seed, row_R, *options)
        ctx.s_is_x = s_is_x(residual, bias, seed, pre)
        ctx.save_for_backward(x if ctx.s_is_x else s, weight, norm_bias, mean, rstd, seed, row_R)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, residual, bias)]
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight, norm_bias, mean, rstd, seed, row_R = ctx.saved_tensors
        p, eps, pre, rms = ctx.options
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        wants_x, wants_residual, wants_bias, wants_weight, wants_norm_bias = ctx.needs_input_grad[:5]
        dy = torch.zeros_like(s) if dy is None else dy
        ds = None if ctx.s_is_x else ds  # the op's second output is empty then, but a compiler passes a gradient for it
        dweight = dnorm_bias = dbias = None
        if backward_takes_formula():
            formula = partial(norm_formula, eps=eps, rms=rms)
            wanted = s.requires_grad, wants_weight, wants_norm_bias
            through, dweight, dnorm_bias = gradients_by_formula(formula, (s, weight, norm_bias), dy.to(s.dtype), wanted)
            dresidual = torch.zeros_like(s) if through is None else through
            dresidual = dresidual if ds is None else dresidual + ds
            dx = dresidual if seed is None else dropout_formula(dresidual, seed, row_R, 0, p)
            dbias = sum_of_rows(dx).to(bias_dtype) if wants_bias else None
            dx = dx.to(x_dtype)
        else:
            apart = residual_dtype is not None and not pre and (seed is not None or residual_dtype != x_dtype)
            vectors = weight.dtype, norm_bias.dtype if wants_norm_bias else None, bias_dtype if wants_bias else None
            sums_dtypes = {dtype for dtype in vectors if dtype is not None}
            dx, dresidual, sums_KN = normalise_backward(
                *(dy, None, ds, s, weight, mean, rstd, seed, row_R, p, rms, wants_norm_bias, wants_bias, x_dtype),
                *(residual_dtype if apart else None, weight.dtype if len(sums_dtypes) == 1 else None),
            )
            sums = iter(sums_KN)
            dweight = next(sums).to(weight.dtype)
            dnorm_bias = next(sums).to(norm_bias.dtype) if wants_norm_bias else None
            dbias = next(sums).to(bias_dtype) if wants_bias else None
            dresidual = dresidual if apart else dx
        dresidual = dy if pre else dresidual
        return (
            dx if wants_x else None,
            dresidual.to(residual_dtype) if wants_residual else None,
            dbias,
            dweight if wants_weight else None,
            dnorm_bias,
            *(None,) * 6,
        )


_differentiable = differentiable(_Normalise, normalise_forward)
_op = Op("normalise", _formula, _fused)
