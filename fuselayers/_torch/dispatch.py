"""dispatch -- what torch's dispatcher is doing: modes, transforms, autograd's hooks, fake tensors."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .guards import compile_lock

__all__ = [
    "AsOnGPU",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "apply_plainly",
    "as_a_compiler",
    "current_device",
    "disable_current_modes",
    "dispatch_mode_is_active",
    "empty_strided_on",
    "has_storage",
    "is_any_autocast_enabled",
    "is_compiling",
    "is_of_a_transform",
    "is_watched",
    "pytree",
    "saved_tensors_hooks_are_active",
    "tangents_are_active",
    "tensors_like",
    "transforms_are_active",
]

has_storage: Final[Callable[[torch.Tensor], bool]] = torch._C._has_storage
is_any_autocast_enabled: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled


def is_of_a_transform(tensor: torch.Tensor) -> bool:
    """True for a tensor of `torch.func`, also of a transform that is over."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def transforms_are_active() -> bool:
    """True inside `torch.vmap`, `torch.func.grad` and their kin, and in forward mode, `torch.autograd.forward_ad`."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def tangents_are_active() -> bool:
    """True in forward mode: `torch.autograd.forward_ad` and `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def dispatch_mode_is_active() -> bool:
    """True under a TorchDispatchMode."""
    return _get_current_dispatch_mode() is not None


def saved_tensors_hooks_are_active() -> bool:
    """True where what autograd saves goes through hooks, as under `torch.utils.checkpoint`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def as_a_compiler() -> Iterator[None]:
    """Be to other threads what a compiling Dynamo is: what FX sets for the whole process while it traces makes a
    compiled function raise, unless somebody says that this is compiling."""
    global _says_compiling
    with compile_lock():
        before = torch.compiler._is_compiling_flag, _says_compiling
        torch.compiler._is_compiling_flag, _says_compiling = True, threading.get_ident()
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag, _says_compiling = before


_says_compiling: int | None = None


def is_compiling() -> bool:
    """`torch.compiler.is_compiling()`, but False in a thread beside one that is inside `as_a_compiler`: a call that
    changed its implementation while another thread compiles could differ from its own checkpoint or backward."""
    return torch.compiler.is_dynamo_compiling() or (
        torch.compiler._is_compiling_flag and _says_compiling in (None, threading.get_ident())
    )


def is_watched() -> bool:
    """True where something but autograd has to see what is called of torch: a mode, a transform, a profiler, a trace.

    A default device is a mode too, which sees nothing of ops that say where their tensors are.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(_BEFORE_DISPATCH)
        or (torch._C._len_torch_function_stack() > 0 and _is_watched_by_a_function_mode())
        or transforms_are_active()
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def _is_watched_by_a_function_mode() -> bool:
    places = range(torch._C._len_torch_function_stack())
    return not all(type(torch._C._get_function_stack_at(place)) is DeviceContext for place in places)


# Of modes that trace before torch dispatches, as torch.export does. Their number would be asked for in Python.
_BEFORE_DISPATCH: Final = torch._C.DispatchKey.PreDispatch


def empty_strided_on(device_type: str) -> Callable[..., torch.Tensor]:
    """Return what makes a tensor on the current device of a type, from size, strides and dtype."""
    makes: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}")
    return makes


def tensors_like(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return what says whether as many tensors are like these, each another object."""
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check


def apply_plainly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without what it does for transforms of `torch.func`."""
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return plain


# Unlike torch.cuda's it does not see to it each time that CUDA has started, as it has where a tensor is on a GPU.
current_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


class AsOnGPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, ops of a namespace run their CUDA implementation on tensors of any device. With meta tensors it shows
    which kernels they would launch."""

    def __init__(self, namespace: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prefix = f"{namespace}::"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith(self.prefix) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs or {})
        return func(*args, **kwargs or {})
