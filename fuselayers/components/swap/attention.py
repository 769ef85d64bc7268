"""Attention with dropout on a CPU, from whose weights nothing is saved.

torch has a fused kernel there for attention without dropout alone. With it, it saves the weights, the mask and their
product: three tensors of [B, H, T, S]. Here q, k, v and a seed are saved.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import ops
from .again import autocast_of, made_in_backward, records, through

__all__ = ["attention_function"]


def attention_function(functions: Any, name: Any, default: Any) -> Any:
    """Return functions.get_interface(name, default), as transformers' models choose their attention."""
    chosen = functions.get_interface(name, default)
    place = getattr(chosen, "__module__", None), getattr(chosen, "__name__", None)
    known = place == ("transformers.integrations.sdpa_attention", "sdpa_attention_forward")
    return _in_mode(chosen) if known and records() else chosen


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _SeededDropout():
            return function(*args, **kwargs)

    return call


class _SeededDropout(TorchFunctionMode):
    """Computes `F.scaled_dot_product_attention` as this file does, where it drops weights on a CPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and _is_for_seeds(*args, **kwargs):
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _is_for_seeds(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *_: Any, **options: Any
) -> bool:
    tensors = [one for one in (q, k, v, attn_mask) if one is not None]
    plain = all(type(one) is Tensor and one.is_cpu for one in tensors)
    alike = q.dtype == k.dtype == v.dtype == torch.float32 and k.shape[:-2] == q.shape[:-2] == v.shape[:-2]
    grouped = options.get("enable_gqa", False) or len(_) > 2
    return plain and alike and not grouped and 0.0 < dropout_p < 1.0 and not torch.is_autocast_enabled("cpu")


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    seed = ops.draw_seed()
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        return ops.dropout(_weights(q * scale, k, mask, is_causal), dropout_p, seed=seed)

    sources = (q, k) if attn_mask is None else (q, k, attn_mask)
    out: Tensor = _Attention.apply(weights, v, *sources)  # type: ignore[no-untyped-call]
    return out


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    scores = q @ k.mT
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~causal, float("-inf")).softmax(-1)
    if mask is None:
        return scores.softmax(-1)
    empty = ~mask if mask.dtype == torch.bool else mask.detach() == float("-inf")
    scores = scores.masked_fill(empty, float("-inf")) if mask.dtype == torch.bool else scores + mask
    nothing = empty.all(-1, keepdim=True)  # a row that attends to nothing is 0, as torch has it
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


class _Attention(torch.autograd.Function):
    """weights(*sources) @ v"""

    @staticmethod
    def forward(ctx: Any, weights: Callable[..., Tensor], v: Tensor, *sources: Tensor) -> Tensor:
        ctx.make, ctx.autocast = weights, autocast_of(v)
        ctx.save_for_backward(v, *sources)
        return weights(*sources) @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        v, *sources = ctx.saved_tensors
        _, needs_v, *needs = ctx.needs_input_grad
        made, inputs = made_in_backward(ctx, sources, needs)
        dv = made.detach().mT @ dy if needs_v else None
        dsources = through(made, inputs, dy @ v.mT) if any(needs) else [None] * len(needs)
        return None, dv, *dsources
