"""The ops that are decomposed before a graph is cut: norms, softmaxes and the activations of this library.

nvFuser has no operation for these, or only one for forward. Its own operations (`exp`, `silu`, sums, `var_mean`) are
not decomposed, nor are the ops that torch runs: matmuls, attention, convolutions, group norms, embeddings, indexing,
other losses and activations. torch's dropout stays whole too, because a later pass gives it its mask.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ...._torch.tracing import decompositions_of

_NAMES: Final = (
    *("_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_safe_softmax"),
    *("_softmax", "_softmax_backward_data", "gelu", "gelu_backward", "leaky_relu", "leaky_relu_backward", "logsumexp"),
    *("masked_fill", "mean", "native_layer_norm", "native_layer_norm_backward", "new_full", "new_zeros", "ones"),
    *("ones_like", "rsub", "sigmoid_backward", "silu_backward", "softplus", "softplus_backward", "t", "tanh_backward"),
    *("threshold", "threshold_backward", "zeros", "zeros_like"),
)


@functools.cache
def nvfuser_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return torch's decompositions of these ops, by overload."""
    return decompositions_of([getattr(torch.ops.aten, name) for name in _NAMES if hasattr(torch.ops.aten, name)])
