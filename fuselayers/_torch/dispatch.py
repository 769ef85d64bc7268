"""dispatch -- ops, storages, plain and fake tensors, and the modes and transforms that act on calls."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeVar

import torch
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

_Function = TypeVar("_Function", bound=Callable[..., Any])

disable_current_modes = _disable_current_modes
is_compiling = torch.compiler.is_compiling
jit_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
# True for a tensor that a transform of `torch.func` has wrapped, also after the transform has ended.
is_of_a_transform = torch._C._functorch.is_functorch_wrapped_tensor
PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of tensors that override none of torch's functions, unlike a DTensor or a quantised weight."""
PLAIN_OR_FAKE_TENSORS: Final = PLAIN_TENSORS | {FakeTensor}
"""The same, and tensors without memory, for which no kernel can run."""


def schema_of(op: OpOverload) -> Any:
    """Return the schema of an op: its arguments and results, and which of them it writes to or views."""
    return op._schema


def may_write(target: object) -> bool:
    """True for an op that writes to an argument, and for one that calls a graph, which may do so."""
    ops = [target]
    if isinstance(target, OpOverloadPacket):
        ops = [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    mutable = any(isinstance(op, OpOverload) and schema_of(op).is_mutable for op in ops)
    return mutable or isinstance(target, HigherOrderOperator)


def constant_in_dynamo(fn: _Function) -> _Function:
    """Decorate a function as `torch.compiler.assume_constant_result` does, without importing Dynamo.

    Dynamo calls the function once, while it traces, and treats the result as a constant.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors that share a storage. While it lives, no new storage gets the same.

    Raises:
        NotImplementedError, RuntimeError: the tensor has no storage, for example a sparse tensor.
    """
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def forked_rng() -> AbstractContextManager[None]:
    """Return a context that restores the generators of the CPU and, if CUDA is initialised, of all GPUs.

    torch's own default initialises CUDA, and warns on a machine with several GPUs.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng(devices)


def is_batched_gradient(tensor: torch.Tensor) -> bool:
    """True for a tensor of `torch.autograd.grad(..., is_grads_batched=True)`, which is no transform of `torch.func`."""
    return not is_compiling() and bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def transforms_are_active() -> bool:
    """True inside `torch.vmap`, `torch.func.grad` and similar transforms, and in forward mode."""
    return torch._C._functorch.maybe_current_level() is not None or tangents_are_active()


def tangents_are_active() -> bool:
    """True in forward mode: `torch.autograd.forward_ad` and `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def is_dynamo_tracing() -> bool:
    """True while Dynamo traces, outside of `torch.func` transforms and of `torch.export`.

    Exported graphs must load without this library.
    """
    return torch.compiler.is_dynamo_compiling() and not (torch.compiler.is_exporting() or _is_traced_in_a_transform())


@constant_in_dynamo
def _is_traced_in_a_transform() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def is_recorded() -> bool:
    """True in `torch.jit.trace`, `torch.fx.symbolic_trace` and `make_fx`, where a compiled function raises an error."""
    return jit_is_tracing() or bool(is_fx_symbolic_tracing())


def is_in_backward() -> bool:
    """True in a function that a backward of this thread calls, such as the forward that a checkpoint repeats."""
    return torch._C._current_graph_task_id() >= 0


def is_wrapper(value: object) -> bool:
    """True for a tensor subclass that holds other tensors, such as a DTensor."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def is_intercepted() -> bool:
    """True where a compiler, a transform or a dispatch mode intercepts the calls of torch's ops."""
    return (
        is_compiling()
        or transforms_are_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)  # torch.export, make_fx
    )


@contextmanager
def deterministic_algorithms(*, warn_only: bool, fill_memory: bool) -> Iterator[None]:
    """Inside this context torch's algorithms are deterministic.

    `fill_memory` fills fresh memory with NaN, or with the largest integer.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled_before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled_before  # type: ignore[attr-defined]
