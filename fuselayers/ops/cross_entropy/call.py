"""cross_entropy -- the loss of a row: -log softmax(logits)[target], smoothed, with a z-loss, then reduce_losses.

    logits   [..., V]   any float dtype; V classes
    target   [...]      int64, in [0, V) or ignore_index
    m, l     [R]        float32; R rows
    a, z                label_smoothing, z_loss

    forward    m      = max_j(logits_j),  l = log(sum_j exp(logits_j - m)),  lse = m + l
               loss   = l + (1 - a) * (m - logits_target) + a * (m - mean_j(logits_j)) + z * lse^2
    backward   dlogits_j = dloss * (exp(logits_j - m) exp(-l) (1 + 2 * z * lse) - (1 - a) * [j = target] - a / V)

Note: [m and l] They stay separate, and nothing is subtracted from lse. If a common offset moves all logits far from 0,
the rounding of lse is as large as the loss of a well predicted row, and a probability exp(logits_j - lse) would have
that error. The difference of a logit and the largest one is exact.

The loss of a row whose target is ignore_index is 0, and so is its gradient. "mean" divides by the number of the other
rows, on the device, without synchronisation. The arithmetic is float32 at least, rounded once.

Saved for backward: logits, target, m and l (for "mean" the number of rows too), never a softmax; backward does not
overwrite them. The eager formula saves log_softmax(logits), in float32 at least, and with a z-loss the logits too.

Bytes moved by the kernels, in elements of logits: 1 forward (read logits), 2 backward (read logits, write dlogits).
They skip ignored rows. Rows are read in pieces of 4096 with a running maximum, for any V; each piece is loaded while
the previous one is computed. Short rows share a program. Another kernel of one program adds the losses and counts the
rows. Where V is not a multiple of 8, a thread loads element by element; padding the vocabulary avoids that.

Note: [targets out of range] On the CPU a call raises an IndexError, as torch does. Kernels cannot raise without a
synchronisation: there the loss and the gradient of such a row are NaN, and no memory outside of the row is read.

Label smoothing: Szegedy et al., "Rethinking the Inception architecture", 2015. z-loss: Chowdhery et al., "PaLM", 2022,
section 5. The running maximum: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from typing import Any

import torch
from torch import Tensor

from ..implementations import Op, backward_takes_formula, differentiable, gradients_by_formula
from ..losses import check_loss_options, check_target, loss_dtype
from ..shapes import check_rows
from .formula import loss_by_formula
from .kernels import fused_loss, fused_loss_gradients

__all__ = ["cross_entropy", "fused_cross_entropy"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """Return the cross entropy of logits with class indices.

    The loss has the logits' dtype; under autocast it is float32 at least, as in `torch.nn.functional.cross_entropy`.

    Args:
        logits: [..., V], any float dtype. Classes come last; in torch's own function they come second.
        target: [...], int64: classes in [0, V), or ignore_index.
        ignore_index: rows with this target are ignored.
        label_smoothing: between 0 and 1, the share of the target spread evenly over all classes.
        z_loss: the factor of logsumexp(logits)^2, which is added to a row's loss and keeps the logits from drifting;
            1e-4 in PaLM.
        reduction: "mean" over the rows that are not ignored (NaN if there are none), "sum", or "none" for [...].
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: logits have no dimension or no class, target does not fit them, label_smoothing or z_loss is out of
            range, or the reduction or the backend is unknown.
        TypeError: logits are not dense and floating, target is not int64, or an option is not a number.
        IndexError: a target is out of range; Triton's kernels give NaN instead.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> cross_entropy(torch.tensor([[0.0, 0.0], [0.0, 50.0]]), torch.tensor([1, -100])).round(decimals=4)
    tensor(0.6931)
    """
    options = ignore_index, label_smoothing, z_loss, reduction
    check_rows("logits", logits)
    if not logits.shape[-1]:
        raise ValueError(f"logits must have at least one class, got {list(logits.shape)}")
    check_target(target, "logits", logits)
    check_loss_options(ignore_index, label_smoothing, z_loss, reduction)
    loss: Tensor = _op(backend, (logits, target), options)
    return loss


def _formula(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: str
) -> Tensor:
    dtype = loss_dtype(logits.dtype, logits.device)
    return loss_by_formula(logits, target, ignore_index, label_smoothing, z_loss, reduction, dtype)


def _fused(logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    loss: Tensor = fused_cross_entropy(logits, target, *options, loss_dtype(logits.dtype, logits.device))
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, *options: Any) -> Tensor:
        loss: Tensor
        loss, sums, count = fused_loss(logits, target, *options)
        ctx.save_for_backward(logits, target, sums, count if count.numel() else None)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, sums, count = ctx.saved_tensors
        if backward_takes_formula():

            def formula(logits: Tensor) -> Tensor:
                return loss_by_formula(logits, target, *ctx.options)

            (dlogits,) = gradients_by_formula(formula, (logits,), dloss, (True,))
        else:
            dlogits = fused_loss_gradients(dloss, count, logits, target, sums, *ctx.options[:3])
        return dlogits, None, *(None for _ in ctx.options)


fused_cross_entropy = differentiable(_CrossEntropy, lambda *call: fused_loss(*call)[0])
_op = Op("cross_entropy", _formula, _fused, cpu_from=1 << 20)  # torch has one kernel for all but the mean
