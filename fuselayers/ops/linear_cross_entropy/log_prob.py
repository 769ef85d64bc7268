"""linear_log_prob -- log softmax(x W^T + bias)[target] and the entropy of each row, without all [R, V] logits.

    x, weight, bias, target   as in linear_cross_entropy
    log_prob, entropy         [...]   float32 at least
    is_argmax                 [...]   bool

    forward    m = max_j(z_j),  l = log(sum_j exp(z_j - m))    z = x W^T + bias
               log_prob  = z_target - m - l
               entropy   = l - sum_j p_j (z_j - m)             p_j = exp(z_j - m - l), 0 log 0 = 0
    backward   dz_j = dlog_prob * ([j = target] - p_j) - dentropy * p_j (log p_j + entropy)

The rows are processed in the chunks of linear_cross_entropy. On a CPU rows with ignore_index are not computed. Backward
recomputes the logits. Saved: x, weight, bias and target, which exist already, and five numbers per row. The op is
differentiable once. Inside a transform of `torch.func`, and for tensor subclasses, it computes all logits. Under
compilers each pass is one op: see linear_cross_entropy's [opaque to compilers].
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import is_compiling
from ..implementations import without_repeats
from ..losses import check_loss_options, check_target
from ..shapes import check_linear
from .call import Recomputed, define_opaque, empty_gradients, needs_all_logits, under_autocast
from .chunks import Gradients, Wanted, cast, in_chunks, logits_of_chunk

_ONLY_ONCE: Final = (
    "linear_log_prob can be differentiated only once; for a backward under create_graph or in a transform "
    "use F.linear(x, weight, bias).log_softmax(-1)"
)
_LOWEST: Final = -1e30  # in place of -inf, whose product with a probability of 0 would be NaN


def linear_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's log-probability, the entropy of its distribution, and whether the token is the likeliest.

    For losses on a policy, such as those of DPO, KTO and GRPO. The first two results have gradients. Under autocast the
    matmuls run in its dtype; the results are in float32 at least.

    Args:
        x: [..., D], any float dtype.
        weight: [V, D].
        target: [...], int64: classes in [0, V), or ignore_index.
        bias: [V], or None.
        ignore_index: the results of rows with this target are 0, 0 and False.

    Returns:
        log_prob and entropy in nats, and is_argmax, each [...]. If several classes are likeliest, it is True for each.

    Raises:
        ValueError: x, weight, bias and target do not fit each other.
        TypeError: a tensor is not dense and floating or, outside autocast, not of x's dtype; target is not int64; or
            ignore_index is not an int.
        IndexError, RuntimeError: a target is out of range.
        RuntimeError: backward runs under `create_graph` or a transform.

    >>> x, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0]])
    >>> log_prob, entropy, is_argmax = linear_log_prob(x, weight, torch.tensor([1]))
    >>> round(log_prob.exp().item(), 4), round(entropy.exp().item(), 4), is_argmax.item()
    (0.5, 2.0, True)
    """
    check_linear(x, weight, bias)
    check_target(target, "x", x)
    check_loss_options(ignore_index, 0.0, 0.0, "none")
    x, weight, bias = under_autocast(x, weight, bias)
    if needs_all_logits(x, weight, bias):
        return linear_log_prob_reference(x, weight, target, bias=bias, ignore_index=ignore_index)
    wanted = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    if any(wanted):
        if is_compiling():
            x, weight, bias = without_repeats((x, weight, bias))
        options = (ignore_index,)
        numbers = Recomputed.apply(_numbers, _backward, _ONLY_ONCE, 3, x, weight, bias, target, options, wanted)  # type: ignore[no-untyped-call]
    else:
        numbers = _numbers(x, weight, bias, target, ignore_index)
    shape = target.shape
    return numbers[0].reshape(shape), numbers[1].reshape(shape), numbers[2].reshape(shape) > 0


def linear_log_prob_reference(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of the op, with all logits, rounded to x's dtype as those of a chunk."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probabilities = logits.log_softmax(-1)
    used = target != ignore_index
    column = target.where(used, 0)[..., None]
    log_prob = log_probabilities.gather(-1, column)[..., 0]
    entropy = -(log_probabilities.exp() * log_probabilities.clamp(min=_LOWEST)).sum(-1)
    is_argmax = logits.gather(-1, column)[..., 0] == logits.amax(-1)
    return log_prob.where(used, 0.0), entropy.where(used, 0.0), is_argmax & used


def _run_numbers(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int) -> Tensor:
    """Return log_prob, entropy, 1 for the likeliest, m and l: [5, R]."""
    if not _computes_ignored_rows(x):
        return in_chunks(x, weight, bias, target, _chunk, skipped=ignore_index)[0]
    used_R = target.flatten() != ignore_index
    numbers = in_chunks(x, weight, bias, target.flatten().where(used_R, 0), _chunk, skipped=None)[0]
    return numbers.where(used_R, 0.0)


def _computes_ignored_rows(x: Tensor) -> bool:
    # The host would wait for the number of the others. A function, so that tests without a GPU can replace it.
    return x.is_cuda


def _run_backward(
    dnumbers: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    numbers: Tensor,
    ignore_index: int,
    wanted: Wanted,
) -> Gradients:
    scale, skipped = dnumbers[:2], None if _computes_ignored_rows(x) else ignore_index
    if _computes_ignored_rows(x):
        used_R = target.flatten() != ignore_index
        target, scale = target.flatten().where(used_R, 0), scale.where(used_R, 0.0)
    return in_chunks(x, weight, bias, target, _chunk, skipped=skipped, scale=scale, wanted=wanted, numbers=numbers)[1]


def _chunk(
    factors: tuple[Tensor, Tensor, Tensor | None], target_C: Tensor, scale_2C: Tensor | None, numbers_5C: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    logits_CV = logits_of_chunk(*factors)
    dtype, wide = logits_CV.dtype, torch.promote_types(logits_CV.dtype, torch.float32)
    target_C1 = target_C[:, None]
    largest_C1 = logits_CV.amax(-1, keepdim=True).to(wide) if numbers_5C is None else numbers_5C[3, :, None]
    # The one tensor of this size in float32 at least, and the logits themselves if they have its dtype.
    below_CV = logits_CV.sub_(largest_C1) if dtype == wide else logits_CV - largest_C1
    del logits_CV
    if numbers_5C is None:
        of_target_C = below_CV.gather(1, target_C1)[:, 0]
        exponentials_CV = below_CV.exp()
        total_C = exponentials_CV.sum(-1)
        log_total_C = total_C.log()
        entropy_C = log_total_C - exponentials_CV.mul_(below_CV.clamp_(min=_LOWEST)).sum(-1) / total_C
        likeliest_C = (of_target_C == 0).to(entropy_C.dtype)
        return torch.stack((of_target_C - log_total_C, entropy_C, likeliest_C, largest_C1[:, 0], log_total_C)), None
    assert scale_2C is not None
    dlog_prob_C1, dentropy_C1 = scale_2C.to(wide)[..., None]
    entropy_C1, log_total_C1 = numbers_5C[1, :, None], numbers_5C[4, :, None]
    log_p_CV = below_CV.sub_(log_total_C1).clamp_(min=_LOWEST)
    p_CV = log_p_CV.exp()
    of_p_C1 = -dentropy_C1 * entropy_C1 - dlog_prob_C1
    dlogits_CV = torch.addcmul(of_p_C1, log_p_CV, -dentropy_C1, out=log_p_CV).mul_(p_CV)
    # Not scatter_add_, which is nondeterministic on a GPU; here each row has one target.
    dlogits_CV.scatter_(1, target_C1, dlogits_CV.gather(1, target_C1) + dlog_prob_C1)
    return numbers_5C, cast(dlogits_CV, dtype)


_numbers = define_opaque(
    "linear_log_prob(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index) -> Tensor",
    _run_numbers,
    lambda x, weight, bias, target, _: x.new_empty(
        5, target.numel(), dtype=torch.promote_types(x.dtype, torch.float32)
    ),
)
_backward = define_opaque(
    "linear_log_prob_backward(Tensor dnumbers, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor numbers, "
    "int ignore_index, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    empty_gradients,
)
