"""kernels -- what single ops compute: shared by the counts on graphs and op by op."""

from types import MappingProxyType
from typing import Final

from .work import Work

ATTENTION: Final = "scaled_dot_product"
# Passes of the fused loss that a compiler sees as one op, with the matrix products of each.
LOSSES: Final = MappingProxyType(
    {
        "fuselayers::linear_cross_entropy_losses": 1,
        "fuselayers::linear_cross_entropy_with_gradients": 3,
        "fuselayers::linear_cross_entropy_with_dlogits": 1,
        "fuselayers::linear_cross_entropy_backward": 3,
    }
)
DRAWS: Final = frozenset({"fuselayers::keep_factors", "aten::bernoulli", "aten::native_dropout", "aten::rand"})
EXPONENTIALS: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("exp", "exp2", "expm1", "erf", "erfc", "tanh", "sigmoid", "log", "log1p", "log2", "sin", "cos"),
        *("gelu", "gelu_backward", "silu", "silu_backward", "softplus", "mish"),
        *("_softmax", "_log_softmax", "_log_softmax_backward_data", "logsumexp"),
    )
)
# Passes over the logits of a chunk: written by the product; read for the largest, for the sum and for the gradient;
# the gradient is written, and read by two products. ops/linear_cross_entropy/chunks has them.
_PASSES_OVER_LOGITS: Final = 7
_KERNELS_OF_LOSS: Final = 8


def loss_work(name: str, *, rows: int, width: int, classes: int, itemsize: int) -> Work:
    """Return what a pass of the fused loss of a language model does: its products, and the passes over the logits.

    >>> loss_work("fuselayers::linear_cross_entropy_losses", rows=2, width=3, classes=5, itemsize=4).matmul_flops
    60.0
    """
    logits = float(rows * classes)
    return Work(
        matmul_flops=2.0 * LOSSES[name] * logits * width,
        moved_bytes=_PASSES_OVER_LOGITS * logits * itemsize,
        exponentials=2.0 * logits,
        kernels=_KERNELS_OF_LOSS,
    )


def attention_work(flops: float, *, causal: bool) -> Work:
    """Return what an attention kernel does: a causal one skips the scores above the diagonal.

    >>> attention_work(8.0, causal=True).attention_flops
    4.0
    """
    return Work(attention_flops=flops / 2 if causal else flops, kernels=1.0)
