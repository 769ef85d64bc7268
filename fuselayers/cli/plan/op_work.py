"""op_work -- count a step op by op, as eager mode runs it, on fake tensors."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..._torch.dispatch import FakeTensorMode, TorchDispatchMode
from ...partition.saved_bytes import saved_by_call
from .kernels import ATTENTION, DRAWS, EXPONENTIALS, attention_work
from .work import Pass, Work


def eager_pass(model: nn.Module, inputs: tuple[Tensor, ...]) -> Pass:
    """Return forward and backward op by op, on fake tensors of a CPU, which has attention kernels for them."""
    with FakeTensorMode():
        named = (*model.named_parameters(), *model.named_buffers())
        weights = {
            name: torch.empty(one.shape, dtype=one.dtype, device="cpu", requires_grad=one.requires_grad)
            for name, one in named
        }
        arguments = tuple(torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in inputs)

        def call() -> Tensor:
            loss: Tensor = torch.func.functional_call(model, weights, arguments)
            return loss

        saved = saved_by_call(call, exempt=weights.values())
        for weight in weights.values():
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


def op_work(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """Return what one op does that is not a view."""
    name, inputs, outputs = op._schema.name, _tensors((args, kwargs)), _tensors(result)
    if ATTENTION in name:
        backward = name.endswith("_backward")
        query, key = inputs[1:3] if backward else inputs[:2]
        products = 5.0 if backward else 2.0  # backward repeats one of forward's
        flops = 2.0 * products * query.numel() * key.shape[2]
        return attention_work(flops, causal=any(one is True for one in (*args, *kwargs.values())))
    if op.overloadpacket in flop_registry:
        return Work(matmul_flops=float(flop_registry[op.overloadpacket](*args, **kwargs, out_val=result)), kernels=1.0)
    elements = float(sum(one.numel() for one in outputs))
    if name in DRAWS:
        return Work(draws=elements, moved_bytes=float(sum(one.nbytes for one in outputs)), kernels=1.0)
    # Of an expanded tensor only its memory is read, of a slice only the slice.
    moved = sum(min(one.untyped_storage().nbytes(), one.numel() * one.itemsize) for one in (*inputs, *outputs))
    return Work(moved_bytes=float(moved), exponentials=elements if name in EXPONENTIALS else 0.0, kernels=1.0)
