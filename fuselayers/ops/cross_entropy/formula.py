"""The formula of cross_entropy and its reference, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses import reduce_losses, row_count

__all__ = ["cross_entropy_reference", "loss_by_formula"]


def loss_by_formula(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the loss, which autograd and compilers differentiate."""
    logits_RV, target_R = logits.flatten(0, -2) if logits.dim() > 1 else logits[None], target.flatten()
    if not label_smoothing and not z_loss and reduction != "none":
        wide_RV = logits_RV if logits_RV.dtype.itemsize > 2 else logits_RV.float()
        loss = F.cross_entropy(wide_RV, target_R, ignore_index=ignore_index, reduction=reduction)
        return loss if loss.dtype == dtype else loss.to(dtype)
    losses = _losses_by_formula(logits_RV, target_R, ignore_index, label_smoothing, z_loss)
    return reduce_losses(losses.reshape(target.shape), row_count(reduction, target, ignore_index), reduction, dtype)


def _losses_by_formula(
    logits_RV: Tensor, target_R: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return the losses of rows, in float32 at least. On the CPU it raises an IndexError for a target out of range."""
    log_probabilities_RV = logits_RV.log_softmax(-1, torch.promote_types(logits_RV.dtype, torch.float32))
    losses_R = F.nll_loss(log_probabilities_RV, target_R, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        even_R = -log_probabilities_RV.mean(-1).masked_fill(target_R == ignore_index, 0.0)
        losses_R = (1 - label_smoothing) * losses_R + label_smoothing * even_R
    if z_loss:
        lse_R = logits_RV.to(log_probabilities_RV.dtype).logsumexp(-1)
        losses_R = losses_R + z_loss * lse_R.masked_fill(target_R == ignore_index, 0.0).square()
    return losses_R


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The definition of the op, in plain torch: the target is a row of probabilities."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = wide.logsumexp(-1, keepdim=True)
    used = target != ignore_index
    classes = torch.arange(logits.shape[-1], device=logits.device)
    wanted = (classes == target[..., None]).to(wide) * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    losses = torch.where(used, (wanted * (lse - wide)).sum(-1) + z_loss * lse[..., 0].square(), 0.0)
    if reduction != "none":
        losses = losses.sum()
    return (losses / used.sum() if reduction == "mean" else losses).to(logits.dtype)
