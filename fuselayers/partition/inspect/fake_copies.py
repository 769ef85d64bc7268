"""fake_copies -- copies of a function and its arguments. Their tensors have shape, dtype and device, but no memory."""

import contextlib
import copy
import functools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..._torch.dispatch import FakeCopyMode, FakeTensor, FakeTensorMode, disable_current_modes, forked_rng
from ..fused_function import FusedFunction
from ..fused_module import FusedModule, eager_view


@contextlib.contextmanager
def fake_copies(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, device: torch.device | str = "cpu"
) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]]:
    """Yield copies of `fn`, `args` and `kwargs`, and the copied parameters and buffers.

    Calling the copies computes shapes. It allocates nothing, changes no original, and restores the random state.
    Compiled and fused functions inside `fn` run eagerly, since compiled code would read memory that is not there.

    Args:
        fn: a function, a method, a partial function or a module. Modules and tensors that it closes over, or reads from
            its globals, are copied too.
        args: its arguments; lists, tuples and dicts are copied with their elements.
        kwargs: its keyword arguments.
        device: the device of the copies of meta tensors. Other tensors keep theirs.

    Raises:
        ValueError: the device is not present.
    """
    # AOTAutograd makes fake tensors in another mode; `allow_non_fake_inputs` is for tensors that were not copied.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(disable_current_modes())
        stack.enter_context(forked_rng())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(fake_mode)
        copier = _Copier(fake_mode, torch.device(device))
        copies = copier.copy(fn), copier.copy(tuple(args)), copier.copy(kwargs)
        yield *copies, copier.parameters_and_buffers()


class _Copier:
    """Copies a function and its arguments; each object has one copy, wherever it appears."""

    def __init__(self, fake_mode: FakeTensorMode, device: torch.device) -> None:
        self._fake_mode = fake_mode
        self._device = device
        self._memo: dict[int, Any] = {}  # as that of `copy.deepcopy`; the caller holds the originals
        self._functions: dict[types.FunctionType, types.FunctionType] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, FusedModule):
            return self.copy(eager_view(value))
        if isinstance(value, FusedFunction):
            return self.copy(value.fn)
        if isinstance(value, types.FunctionType):
            return self._copy_function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords))
        if type(value) is tuple:
            return tuple(self.copy(element) for element in value)
        if type(value) in (list, dict):
            return self._copy_container(value)
        if isinstance(value, nn.Module | torch.Tensor):
            with FakeCopyMode(cast(FakeTensorMode, self)):  # it calls `from_tensor` only
                return copy.deepcopy(value, self._memo)
        return value

    def from_tensor(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the copy of one tensor. FakeCopyMode calls this while `copy.deepcopy` runs."""
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            return self._fake_mode.from_tensor(tensor, **options)
        device = self._device if tensor.device.type == "meta" else tensor.device
        if device.type != "cpu" and not torch.get_device_module(device).is_available():
            raise ValueError(
                f"capture needs a {device.type} device to trace backward for one, and there is none here; capture on "
                "device='cpu', or on a machine that has it"
            )
        size, stride = ([int(number) for number in sizes] for sizes in (tensor.size(), tensor.stride()))
        with self._fake_mode:
            fake = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def parameters_and_buffers(self) -> list[torch.Tensor]:
        copied = list(self._memo.values())
        parameters: list[torch.Tensor] = [tensor for tensor in copied if isinstance(tensor, nn.Parameter)]
        modules = [module for module in copied if isinstance(module, nn.Module)]
        return parameters + [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def _copy_container(self, value: Any) -> Any:
        if id(value) not in self._memo:
            copied = self._memo[id(value)] = type(value)()  # before it is filled: it may contain itself
            if isinstance(value, list):
                copied.extend(self.copy(element) for element in value)
            else:
                copied.update((key, self.copy(element)) for key, element in value.items())
        return self._memo[id(value)]

    def _copy_function(self, fn: types.FunctionType) -> types.FunctionType:
        # Tensors and modules that `fn` reads are copied: Dynamo makes fake tensors of real ones, but not of meta ones,
        # and a traced module writes to its attributes.
        if fn in self._functions:
            return self._functions[fn]
        in_globals = {name: fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__}
        copied = {
            name: self.copy(value) for name, value in in_globals.items() if isinstance(value, nn.Module | torch.Tensor)
        }
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        function = types.FunctionType(
            fn.__code__.replace(),  # a new code object, since Dynamo caches by code object
            _globals_with(copied, fn.__globals__) if copied else fn.__globals__,
            fn.__name__,
            self.copy(fn.__defaults__),
            cells,
        )
        function.__qualname__, function.__module__, function.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
        function.__dict__.update(fn.__dict__)
        function.__kwdefaults__ = self.copy(fn.__kwdefaults__)
        self._functions[fn] = function  # before the cells are filled: a function may close over itself
        for cell, original in zip(cells, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that is not assigned yet
                cell.cell_contents = self.copy(original.cell_contents)
        return function


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function, and the functions defined inside it, may read."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _globals_with(copied: dict[str, Any], module_globals: dict[str, Any]) -> dict[str, Any]:
    # With `__name__`, Dynamo would look in the module itself, where the originals are.
    return {name: copied.get(name, value) for name, value in module_globals.items() if name != "__name__"}
