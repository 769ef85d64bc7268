"""normalise -- the formula of all norm ops: layer norm and RMS norm after bias, dropout and residual sum.

    x, residual, s, y           [..., N]   any float dtype
    weight, norm_bias, bias     [N]        both biases optional
    seed                        []         int64
    mean, rstd                  [R]        float32, R rows; RMS norm has no mean

    d = dropout(x + bias)       s = d + residual         y = norm(s)               post
                                s = d                    y = norm(s) + residual    pre

    forward    rstd = 1 / sqrt(mean((s - mean)^2) + eps),   norm(s) = (s - mean) * rstd * weight + norm_bias
    backward   with n = (s - mean) * rstd and w = dy * weight:
               ds = (w - n * mean(w * n) - mean(w)) * rstd + the incoming gradient of s       RMS norm: no mean(w)
               dx = ds * keep * scale,   dresidual = ds (pre: dy)
               dweight, dnorm_bias, dbias = sums of dy * n, dy, dx over every dimension but the last

Dtypes: torch's promotion of the summands gives the dtype of s; norm(s) has the same. Weight and norm_bias are rounded
to it. Intermediate values are float32 (float64 where s is float64).

Saved for backward: s, mean and rstd (two numbers per row), and a seed (see dropout, also for shards).

Bytes moved by the kernels: forward reads x and residual, writes y, and s if it is not x. Backward reads dy, in a
compiled graph also as two summands, s and the incoming gradient of s; it writes dx, and dresidual if it is neither dx
nor dy. In addition there are the statistics, and for each program one read of the vectors and a float32 row for each
sum. A row is read once. Up to 8192 columns it stays in registers; longer rows spill (see `rows.tile_of_rows`). Beyond
32768 columns a GPU runs the formula.

Note: [the sums over rows] Only as many programs start as run at a time, and each takes many rows. A program reads the
weight once and keeps its partial sums in registers. A second kernel adds the partial sums, one float32 row per program,
and rounds them to the weight's dtype. Without atomics the result is deterministic on one GPU.
"""

import math
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from ...names import no_such
from ..dropout import dropout_reference
from ..shards import Shard

NormStyle = Literal["post", "pre", "prenorm"]


class RmsNormOptions(TypedDict, total=False):
    """Options of the ops that drop, add and normalise, for type checkers."""

    bias: Tensor | None
    p: float
    eps: float
    training: bool
    seed: Tensor | None
    shard: Shard | None
    backend: str


class LayerNormOptions(RmsNormOptions, total=False):
    """The same options, and the norm's bias."""

    norm_bias: Tensor | None


def check_style(style: str) -> None:
    """Raise unless `style` is one of NormStyle: TypeError for another type, ValueError for an unknown name."""
    if not isinstance(style, str):
        raise TypeError(f"norm style must be a string, got a {type(style).__name__}")
    if style not in get_args(NormStyle):
        raise ValueError(no_such("norm style", style, get_args(NormStyle)))


def check_eps(eps: float) -> None:
    """Raise unless eps is a finite number >= 0: TypeError for another type, ValueError for other numbers."""
    if type(eps) is not float and not isinstance(eps, (int, float, torch.SymInt, torch.SymFloat)):
        advice = "pass eps.item()" if isinstance(eps, Tensor) else "pass a float"
        raise TypeError(f"eps must be a number, got a {type(eps).__name__}; {advice}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")


def norm_formula(s: Tensor, weight: Tensor, norm_bias: Tensor | None, *, eps: float, rms: bool) -> Tensor:
    """Return s normalised, in s's dtype."""
    # torch's kernels differ for parameters of another dtype: the CPU kernel takes float32 parameters with a bfloat16
    # input but not the reverse, the decomposition takes both. The cast avoids the difference.
    dtype = s.dtype
    weight = weight if weight.dtype == dtype else weight.to(dtype)
    if rms:
        y = torch.rms_norm(s, s.shape[-1:], weight, eps)
    else:
        norm_bias = norm_bias if norm_bias is None or norm_bias.dtype == dtype else norm_bias.to(dtype)
        y = torch.layer_norm(s, s.shape[-1:], weight, norm_bias, eps)
    # On a GPU, autocast returns float32; the formula keeps s's dtype.
    return y if y.dtype == dtype else y.to(dtype)


def norm_reference(s: Tensor, weight: Tensor, norm_bias: Tensor | None, *, eps: float, rms: bool) -> Tensor:
    """Return the norm by its definition, in float32 at least. Used by the references of all norm ops."""
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    centred = wide if rms else wide - wide.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(s.dtype)
    return (y if norm_bias is None else y + norm_bias.to(s.dtype)).to(s.dtype)


def dropped_norm_reference(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    *,
    p: float,
    eps: float,
    style: NormStyle,
    seed: Tensor | None,
    shard: Shard | None,
    rms: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the definition of the ops that drop, add and normalise; without a seed nothing is dropped."""
    d = x if bias is None else x + bias
    d = d if seed is None else dropout_reference(d, p, seed=seed, shard=shard)
    s = d if style == "pre" else d + residual
    y = norm_reference(s, weight, norm_bias, eps=eps, rms=rms)
    if style == "prenorm":
        return y, s
    return y + residual if style == "pre" else y


def s_is_x(residual: Tensor | None, bias: Tensor | None, seed: Tensor | None, pre: bool) -> bool:
    """Return whether s is x itself, so that s is not written."""
    return bias is None and seed is None and (pre or residual is None)
