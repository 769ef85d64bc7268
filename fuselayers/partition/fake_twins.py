"""fake_twins -- a function with all that it is made of and is given, without memory: shapes, dtypes, devices."""

import contextlib
import copy
import functools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._torch.dispatch import FakeTensor, FakeTensorMode, disable_current_modes
from .fuse import FusedFunction
from .fused_module import FusedModule

__all__ = ["fake_twins"]


@contextlib.contextmanager
def fake_twins(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, device: torch.device | str = "cpu"
) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any], Callable[[], list[torch.Tensor]]]]:
    """Within it, calling the twin of `fn` with the twins of its arguments computes shapes, and nothing else.

    The last of what it yields returns the twins of all parameters and buffers that were met on the way.

    Whatever is compiled or fused inside of `fn` runs eagerly there: code compiled for memory must not be given none.
    """
    # Fake tensors of AOTAutograd keep their own mode; `allow_non_fake_inputs` is for tensors no twin was made of.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _random_state_kept(), torch.compiler.set_stance("force_eager"), fake_mode:
        twins = _Twins(fake_mode, torch.device(device))
        yield twins.of(fn), twins.of(tuple(args)), twins.of(dict(kwargs)), twins.parameters_and_buffers


class _Twins:
    """Makes fake twins of what a function is made of and is given; the same object has the same twin everywhere."""

    def __init__(self, fake_mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = _FakeCopies(fake_mode, device)
        self._memo: dict[int, Any] = {}
        self._functions: dict[types.FunctionType, types.FunctionType] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}  # by identity; the original too, so that it stays alive

    def of(self, value: Any) -> Any:
        """Return the twin: tensors without memory, in copies of the modules, lists and functions that hold them."""
        if isinstance(value, FusedModule):
            return self.of(value.module)
        if isinstance(value, FusedFunction):
            return self.of(value.fn)
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
        if type(value) is tuple:
            return tuple(self.of(element) for element in value)
        if type(value) in (list, dict):
            return self._of_container(value)
        if isinstance(value, nn.Module | torch.Tensor):
            with self._mode:
                return copy.deepcopy(value, self._memo)
        return value

    def parameters_and_buffers(self) -> list[torch.Tensor]:
        """The twins of those that have been met, alone or in a module."""
        met = list(self._memo.values())
        alone = [one for one in met if isinstance(one, nn.Parameter)]
        modules = [one for one in met if isinstance(one, nn.Module)]
        return alone + [one for module in modules for one in (*module.parameters(), *module.buffers())]

    def _of_container(self, value: Any) -> Any:
        if id(value) not in self._containers:
            twin: Any = type(value)()
            self._containers[id(value)] = value, twin  # before it is filled: it may hold itself
            if isinstance(value, list):
                twin.extend(self.of(element) for element in value)
            else:
                twin.update((key, self.of(element)) for key, element in value.items())
        return self._containers[id(value)][1]

    def _of_function(self, fn: types.FunctionType) -> types.FunctionType:
        # Dynamo would make fake tensors of real ones by itself, but not of meta ones; and what a traced module does to
        # its own attributes must be done to a twin.
        if fn in self._functions:
            return self._functions[fn]
        in_globals = {name: fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__}
        replaced = {name: self.of(one) for name, one in in_globals.items() if isinstance(one, nn.Module | torch.Tensor)}
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        twin = types.FunctionType(
            fn.__code__.replace(),  # an equal one, that is nobody else's: Dynamo keeps what it knows by code object
            _globals_with(replaced, fn.__globals__) if replaced else fn.__globals__,
            fn.__name__,
            self.of(fn.__defaults__),
            cells,
        )
        twin.__qualname__, twin.__module__, twin.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
        twin.__dict__.update(fn.__dict__)
        twin.__kwdefaults__ = self.of(fn.__kwdefaults__)
        self._functions[fn] = twin  # before the cells are filled: a function may be in a cell of its own
        for cell, original in zip(cells, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                cell.cell_contents = self.of(original.cell_contents)
        return twin


class _FakeCopies(TorchFunctionMode):
    """While it is on, `copy.deepcopy` of a tensor gives a fake one, and reads none of its memory."""

    def __init__(self, fake_mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._device = device

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.clone:  # how a parameter copies its data
            return self._fake(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            return self._fake_mode.from_tensor(tensor, static_shapes=True)
        device = self._device if tensor.device.type == "meta" else tensor.device
        _check_present(device)
        size, stride = ([int(one) for one in sizes] for sizes in (tensor.size(), tensor.stride()))
        with self._fake_mode:
            twin = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)


def _check_present(device: torch.device) -> None:
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        raise ValueError(
            f"capture needs a {device.type} device to trace backward for one, and there is none here; capture on "
            "device='cpu', or on a machine that has it"
        )


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and the functions written inside it may look up among the globals."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _globals_with(replaced: dict[str, Any], module_globals: dict[str, Any]) -> dict[str, Any]:
    # Without its name, Dynamo does not look in the module, where the originals still are.
    return {name: replaced.get(name, value) for name, value in module_globals.items() if name != "__name__"}


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    with disable_current_modes():
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        of_torch, of_cuda = torch.get_rng_state(), [torch.cuda.get_rng_state(place) for place in devices]
    of_python = random.getstate()
    try:
        yield
    finally:
        random.setstate(of_python)
        with disable_current_modes():
            torch.set_rng_state(of_torch)
            for place, state in zip(devices, of_cuda, strict=True):
                torch.cuda.set_rng_state(state, place)
