"""onednn -- products of float32 matrices by the oneDNN that torch carries.

torch's own `mm` and `linear` call MKL for float32 on a CPU. The only way to oneDNN is a private op. It copies an `a`
that is not contiguous. Its `b` must have a fast layout and K must not be 0. The bias must be contiguous, or the
result is wrong.
"""

import torch
from torch import Tensor

from .tracing import is_known, size_hint

PRODUCT_OP = "_linear_pointwise"
"""The op's name in `torch.ops.mkldnn`."""


def has_onednn() -> bool:
    """Return whether this torch was built with oneDNN and has the op."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, PRODUCT_OP)


def allows_onednn() -> bool:
    """Return whether the user's settings allow oneDNN in full float32.

    `torch.backends.mkldnn` may be disabled or deterministic. With a lower precision, set there, in
    `torch.backends.fp32_precision` or by `torch.set_float32_matmul_precision`, torch calls oneDNN by itself.
    """
    return (
        torch._C._get_mkldnn_enabled()
        and not torch._C._get_mkldnn_deterministic()
        and torch._C._get_fp32_precision_getter("mkldnn", "matmul") in ("none", "ieee")
    )


def has_fast_layout(b_KN: Tensor) -> bool:
    """Return whether a matrix, or its transpose, is contiguous; for a fake tensor, whether it is for every size.

    For others, such as a part of wider rows, oneDNN runs its reference code, which takes 200 to 1,000 times as long as
    MKL; for rows that overlap it raises RuntimeError.
    """
    (inner, columns), (first, second) = b_KN.shape, b_KN.stride()
    by_rows = is_known(first == columns) and is_known(second == 1)
    return by_rows or (is_known(first == 1) and is_known(second == inner))


def is_cheaper_transposed(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Return whether (b^T a^T)^T copies less than a b, if a^T is contiguous: b^T and the result instead of a.

    So it is for the gradient of a head's weight, dy^T x, where dy is as large as the logits.
    """
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    turned = is_known(a_MK.stride(0) == 1) and is_known(a_MK.stride(1) == rows)
    return turned and size_hint(rows * inner) > size_hint((inner + rows) * columns)


def onednn_product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return a @ b + bias, contiguous."""
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise.default(a_MK, b_KN.t(), bias_N, "none", [], "")
    return y_MN
