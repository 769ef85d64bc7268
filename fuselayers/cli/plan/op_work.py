"""op_work -- what one op does, and what a step does op by op, as eager mode runs it, on fake tensors."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..._torch.dispatch import FakeTensorMode, TorchDispatchMode
from ...configs.costs import fake_weights
from ...partition.saved_bytes import saved_by_call
from .work import Pass, Work

ATTENTION: Final = "scaled_dot_product"
# Passes of the fused loss that a compiler sees as one op, with the matrix products of each.
_LOSSES: Final = MappingProxyType(
    {
        "fuselayers::linear_cross_entropy_losses": 1,
        "fuselayers::linear_cross_entropy_with_gradients": 3,
        "fuselayers::linear_cross_entropy_with_dlogits": 1,
        "fuselayers::linear_cross_entropy_backward": 3,
    }
)
# Passes over the logits of a chunk: written by the product; read for the largest, for the sum and for the gradient;
# the gradient is written, and read by two products. ops/linear_cross_entropy/chunks has them.
_PASSES_OVER_LOGITS: Final = 7
_KERNELS_OF_LOSS: Final = 8
_DRAWS: Final = frozenset(
    {"fuselayers::keep_factors", "fuselayers::keep_mask", "aten::bernoulli", "aten::native_dropout", "aten::rand"}
)
# They read only the rows that they return.
_GATHERS: Final = frozenset({"aten::embedding", "aten::index_select"})
_EXPONENTIALS: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("exp", "exp2", "expm1", "erf", "erfc", "tanh", "sigmoid", "log", "log1p", "log2", "sin", "cos"),
        *("gelu", "gelu_backward", "silu", "silu_backward", "softplus", "mish"),
        *("_softmax", "_log_softmax", "_log_softmax_backward_data", "logsumexp"),
    )
)


def op_work(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """Return what one op does that is a kernel of its own, and no view.

    >>> a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")
    >>> op_work(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    Work(matmul_flops=48.0, attention_flops=0.0, moved_bytes=0.0, exponentials=0.0, draws=0.0, kernels=1.0)
    """
    name, inputs, outputs = _name(op), _tensors((args, kwargs)), _tensors(result)
    if name in _LOSSES:
        x, weight = inputs[:2]
        logits = float(x.numel() // x.shape[-1] * weight.shape[0])
        return Work(
            matmul_flops=2.0 * _LOSSES[name] * logits * x.shape[-1],
            moved_bytes=_PASSES_OVER_LOGITS * logits * x.itemsize,
            exponentials=2.0 * logits,
            kernels=_KERNELS_OF_LOSS,
        )
    if ATTENTION in name:
        backward = name.endswith("_backward")
        query, key = inputs[1:3] if backward else inputs[:2]
        products = 5.0 if backward else 2.0  # backward repeats one of forward's
        flops = 2.0 * products * query.numel() * key.shape[2]
        causal = any(one is True for one in (*args, *kwargs.values()))  # skips the scores above the diagonal
        return Work(attention_flops=flops / 2 if causal else flops, kernels=1.0)
    formula = flop_registry.get(getattr(op, "overloadpacket", None))
    if formula is not None:
        return Work(matmul_flops=float(formula(*args, **kwargs, out_val=result)), kernels=1.0)
    written = float(sum(one.nbytes for one in outputs))
    if name in _DRAWS:
        return Work(draws=float(sum(one.numel() for one in outputs)), moved_bytes=written, kernels=1.0)
    # An expanded tensor is read once, and of a slice's storage only the slice.
    read = [float(min(one.untyped_storage().nbytes(), one.nbytes)) for one in inputs]
    if name in _GATHERS:
        read = [min(one, written) for one in read]
    return Work(moved_bytes=sum(read) + written, exponentials=exponentials_of(op, outputs), kernels=1.0)


def exponentials_of(op: Any, outputs: Iterable[Tensor]) -> float:
    """Return how many exponentials, or the like, an op computes."""
    return float(sum(one.numel() for one in outputs)) if _name(op) in _EXPONENTIALS else 0.0


def _name(op: Any) -> str:
    return op._schema.name if isinstance(op, torch._ops.OpOverload) else ""


def fake_step(model: nn.Module, inputs: Iterable[Tensor]) -> tuple[Callable[[], Tensor], Iterable[Tensor]]:
    """Return a call of a model that returns its loss, and its weights, as fake tensors of a CPU, which has attention
    kernels for them. To be used within a `FakeTensorMode`.

    Args:
        model: on the meta device.
        inputs: likewise.
    """
    weights = fake_weights(model)
    arguments = tuple(torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in inputs)

    def call() -> Tensor:
        loss: Tensor = torch.func.functional_call(model, weights, arguments)
        return loss

    return call, weights.values()


def eager_pass(model: nn.Module, inputs: Iterable[Tensor]) -> Pass:
    """Return forward and backward op by op."""
    with FakeTensorMode():
        call, weights = fake_step(model, inputs)
        saved = saved_by_call(call, exempt=weights)
        for weight in weights:
            if weight.requires_grad:
                # Gradients are counted with the weights, not among the activations.
                weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        counter = _Counter()
        with counter:
            loss = call()
        forward, counter.work = counter.work, Work()
        with counter:
            loss.backward()  # type: ignore[no-untyped-call]
    return Pass(float(saved), 0.0, float(max(counter.peak - saved, 0)), forward, counter.work)


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of the ops that run, and the memory of their results, until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()
        self.peak = 0
        self._live = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        made = {one.untyped_storage()._cdata: one.untyped_storage() for one in _tensors(result)}
        fresh = [storage for address, storage in made.items() if address not in given]
        for storage in fresh:
            self._live += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self._live)
        if fresh or op._schema.is_mutable:  # else it is a view
            self.work += op_work(op, args, kwargs or {}, result)
        return result

    def _free(self, size: int) -> None:
        self._live -= size


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]
