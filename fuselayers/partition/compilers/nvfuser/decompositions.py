"""The ops that are decomposed before a graph is cut: norms, softmaxes, losses and activations.

nvFuser has no operation for these, or only one for forward. Its own operations (`exp`, `silu`, sums, `var_mean`) are
not decomposed, nor are the ops that torch runs: matmuls, attention, convolutions, embeddings, indexing. torch's dropout
stays whole too, because a later pass gives it its mask.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ...._torch.tracing import decompositions_of

_NAMES: Final = (
    *("_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_safe_softmax"),
    *("_softmax", "_softmax_backward_data", "addcdiv", "addcmul", "binary_cross_entropy_with_logits", "celu", "elu"),
    *("elu_backward", "gelu", "gelu_backward", "glu", "glu_backward", "hardsigmoid", "hardsigmoid_backward"),
    *("hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "huber_loss", "huber_loss_backward"),
    *("leaky_relu", "leaky_relu_backward", "lerp", "linalg_vector_norm", "log_sigmoid_backward"),
    *("log_sigmoid_forward", "logaddexp", "logsumexp", "masked_fill", "mish", "mish_backward", "mse_loss"),
    *("mse_loss_backward", "nan_to_num", "native_group_norm", "native_group_norm_backward", "native_layer_norm"),
    *("native_layer_norm_backward", "new_full", "new_zeros", "ones", "ones_like", "rsub", "selu", "sigmoid_backward"),
    *("silu_backward", "sinc", "smooth_l1_loss", "smooth_l1_loss_backward", "softplus", "softplus_backward", "stack"),
    *("std", "t", "tanh_backward", "threshold", "threshold_backward", "xlogy", "zeros", "zeros_like"),
)


@functools.cache
def nvfuser_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return torch's decompositions of these ops, by overload."""
    return decompositions_of([getattr(torch.ops.aten, name) for name in _NAMES if hasattr(torch.ops.aten, name)])
