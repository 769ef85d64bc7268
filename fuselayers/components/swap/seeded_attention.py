"""CPU attention with dropout that saves a seed instead of the weights.

    q      [..., T, D]
    k, v   [..., S, D]
    mask   broadcast to [..., T, S], boolean or added; or None

On a CPU, torch's fused kernel supports attention only without dropout. With dropout, torch saves the weights, a mask
and the product: three tensors of [..., T, S]. Here q, k, v and a seed are saved, and backward recomputes the weights.
It is one registered op under a compiler too: otherwise the compiler would merge the weights of forward and backward,
and save them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ... import ops
from ..._torch.dispatch import jit_is_tracing, transforms_are_active
from .parts import is_number


class SeededDropout(TorchFunctionMode):
    """Runs `seeded_attention` for each `F.scaled_dot_product_attention`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not (jit_is_tracing() or transforms_are_active()):
            return seeded_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def drops(module: nn.Module) -> bool:
    """Return whether an attribute of the module, a layer or a number, is a dropout with a probability above 0."""
    return _has_dropout({**vars(module), **dict(module.named_children())})


def may_drop_in_attention(block: nn.Module) -> bool:
    """Return whether a block, a module in it whose class is named an attention, or their config has a dropout."""
    names = {module: type(module).__name__.lower() for module in block.modules()}
    holders = [module for module, name in names.items() if module is block or "attention" in name or "attn" in name]
    configs = [getattr(getattr(module, "config", None), "__dict__", {}) for module in holders]
    return any(map(drops, holders)) or any(map(_has_dropout, configs))


def _has_dropout(attributes: Mapping[str, Any]) -> bool:
    values = [getattr(value, "p", value) for name, value in attributes.items() if "drop" in name]
    return any(is_number(value) and value > 0 for value in values)


def seeded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `F.scaled_dot_product_attention` with a dropout mask that is generated from a seed.

    Calls that are not supported, such as those that drop nothing, go to torch.
    """
    plain = all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in (query, key, value))
    alike = key.shape[:-2] == query.shape[:-2] == value.shape[:-2] and not enable_gqa
    scores = (*query.shape[:-1], key.shape[-2])
    clear = attn_mask is None or (
        not is_causal
        and attn_mask.dtype in (torch.bool, torch.float32)
        and torch.broadcast_shapes(attn_mask.shape, scores) == scores  # type: ignore[no-untyped-call]
    )
    drops = 0.0 < dropout_p < 1.0 and not torch.is_autocast_enabled("cpu")
    if not (plain and alike and clear and drops):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _attention(query, key, value, attn_mask, ops.draw_seed(), dropout_p, is_causal, scale)
    return out


@torch.library.custom_op("fuselayers::seeded_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor, p: float, is_causal: bool, scale: float
) -> Tensor:
    return ops.dropout(_weights(q, k, mask, is_causal, scale), p, seed=seed) @ v


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.library.custom_op("fuselayers::seeded_attention_backward", mutates_args=())
def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = _weights(q, k, mask, is_causal, scale)
    dv = ops.dropout(weights, p, seed=seed).mT @ dy
    dweights = ops.dropout(dy @ v.mT, p, seed=seed)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
    dmask = dscores.sum_to_size(mask.shape) if wants_mask and mask is not None else q.new_empty(0)
    dscores = dscores * scale
    return dscores @ k, dscores.mT @ q, dv, dmask


@_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dmask = torch.empty(mask.shape, dtype=q.dtype) if rest[-1] and mask is not None else q.new_empty(0)
    return *(tensor.new_empty(tensor.shape) for tensor in (q, k, v)), dmask


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    wants_mask = ctx.needs_input_grad[3]
    *gradients, dmask = _backward(dy, *ctx.saved_tensors, *ctx.options, wants_mask)
    return *gradients, dmask if wants_mask else None, None, None, None, None


_attention.register_autograd(_gradients, setup_context=_keep)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = (q * scale) @ k.mT
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~causal, float("-inf")).softmax(-1)
    if mask is None:
        return scores.softmax(-1)
    empty = ~mask if mask.dtype == torch.bool else mask == float("-inf")
    scores = scores.masked_fill(empty, float("-inf")) if mask.dtype == torch.bool else scores + mask
    nothing = empty.all(-1, keepdim=True)  # a row that attends to nothing is 0, as in torch
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
