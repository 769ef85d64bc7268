"""The base of the fused layers: one op, with its own bias."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..fused_op import op_for
from ..ranges import Probability, Size, in_range

__all__ = ["BiasedOp"]


class BiasedOp(nn.Module):
    """The base of layers that are one op with a learned bias."""

    built_in: ClassVar[frozenset[str]] = frozenset({"backend", "partition"})

    @in_range
    def __init__(
        self,
        op: Callable[..., Any],
        *,
        p: Probability,
        bias_shape: Size | None,
        backend: str | None,
        partition: str,
    ) -> None:
        super().__init__()
        op_for(op, backend=backend, partition=partition)  # a misspelt name fails here, not in the first forward
        self.op = op
        self.p = p
        self.backend = backend
        self.partition = partition
        self.bias = nn.Parameter(torch.empty(bias_shape)) if bias_shape is not None else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the bias with zeros."""
        if self.bias is not None:
            self.bias.zero_()

    def _bias_like(self, x: Tensor) -> Tensor | None:
        # Under autocast x is bfloat16, from a matmul; a float32 bias would make the result float32.
        return None if self.bias is None else self.bias.to(x.dtype)

    def _call(self, *tensors: Tensor, bias: Tensor | None, **arguments: Any) -> Any:
        op = op_for(self.op, backend=self.backend, partition=self.partition)
        return op(*tensors, bias=bias, p=self.p, training=self.training, **arguments)

    def extra_repr(self) -> str:
        bias_shape = None if self.bias is None else self.bias.numel()
        return f"p={self.p}, bias_shape={bias_shape}, backend={self.backend!r}, partition={self.partition!r}"
