"""FusedModule -- a module's fused twin: its own forward, the same weights."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from .._torch.dispatch import is_compiling, may_run_again
from .report import FusionReport

__all__ = ["FusedModule", "call_unfused", "is_unfused", "unfused"]

_SHARED: Final = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_load_state_dict_post_hooks",
    # The module is what saves and loads.
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


class _Unfused:
    """That fused functions run eagerly for a while.

    Attributes:
        asked: whether one was met.
        in_checkpoints: whether they do where backward may run forward once more, too.
    """

    def __init__(self, *, in_checkpoints: bool) -> None:
        self.asked = False
        self.in_checkpoints = in_checkpoints


_UNFUSED: ContextVar[_Unfused | None] = ContextVar("_UNFUSED", default=None)


class FusedModule(nn.Module):
    """A fused view of a module. Made by `fuse`.

    It shares the module's parameters, buffers, submodules and train/eval mode, so `parameters()`, `state_dict()`,
    `load_state_dict()`, `to()`, `train()` and hooks of an optimizer see one and the same thing from either side, under
    the module's own names. Other attributes and methods are the module's too, to read and to set, but for Python's
    special methods (`len(fused)`, `fused[0]`); only calling it is different.

    Attributes:
        module: the module as it was given, which still runs eagerly.
        fused: the fused function that a call goes through.
    """

    module: nn.Module
    fused: Callable[..., Any]

    def __init__(self, module: nn.Module, fused: Callable[..., Any]) -> None:
        self.__dict__["module"] = module  # not registered: it is this module, not a child of it
        super().__init__()
        self.__dict__["fused"] = fused
        # Note: [shared registries] The dictionaries themselves are shared, not copied, so that a parameter that is
        # replaced on one side (tied weights, sharding, a meta tensor materialised) is replaced on the other.
        for registry in _SHARED:
            self.__dict__[registry] = module.__dict__[registry]
        self.__dict__["_forward_of_view"] = _forward_like(module)

    @property
    def training(self) -> bool:
        return bool(self.__dict__["module"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        # nn.Module's own constructor sets the mode of a new module; the module that is shared has one already.
        if "fused" in self.__dict__:
            self.__dict__["module"].training = mode

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        # Transparent to Dynamo, which cannot make a method here, nor, in 2.11, look the fused function up, since it
        # takes an attribute that could be a descriptor for one.
        if torch.compiler.is_dynamo_compiling():
            return self.module
        return MethodType(self.__dict__["_forward_of_view"], self)

    def report(self) -> FusionReport:
        """Return which backend serves each graph of the module that was compiled so far, and why."""
        report: FusionReport = self.__dict__["fused"].report()
        return report

    # Note: [what a module may override] These are inherited from nn.Module, so that `__getattr__` is never asked for
    # them; a module that freezes its batch norm in `train`, or saves more than its parameters, has its own.
    def train(self, mode: bool = True) -> "FusedModule":
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def get_extra_state(self) -> Any:
        return self.module.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        self.module.set_extra_state(state)

    # A module that holds this one saves and loads it by these.
    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    # As `init_` functions go through a model's parts, asking which kind each is.
    def apply(self, fn: Any) -> "FusedModule":
        self.module.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "FusedModule":
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What nn.Module's constructor gave this object is its own (hooks, for one); the rest belongs to the module,
        # which is what runs: an option set on the view must not be lost on it.
        if name == "parametrizations":
            raise ValueError(
                f"a parametrization must be on the module that runs, got the fused view of it; make "
                f"{type(self.__dict__['module']).__name__} anew and parametrize it before it is fused"
            )
        if name == "__class__":
            # What wraps a module by a class of its own (FSDP2) wraps the calls of this one, not the module's.
            object.__setattr__(self, name, value)
        elif name in self.__dict__ or name == "training":
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["module"], name)

    def extra_repr(self) -> str:
        return f"fused {type(self.__dict__['module']).__name__}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Hooks, above all. What `compile` of nn.Module made is made anew, as nn.Module has it.
        not_own = {*_SHARED, "module", "fused", "_forward_of_view", "_compiled_call_impl"}
        own = {name: value for name, value in self.__dict__.items() if name not in not_own}
        return _rewrap, (self.__dict__["module"], self.__dict__["fused"]), own


def _forward_like(module: nn.Module) -> Callable[..., Any]:
    """Return a view's forward, with the signature of the module's: torch.export takes the arguments' names from it."""

    def forward(view: FusedModule, /, *args: Any, **kwargs: Any) -> Any:
        # Transparent inside another compiler, as the fused function is.
        return view.module(*args, **kwargs) if is_compiling() else view.fused(*args, **kwargs)

    named: Any = forward
    try:
        signature = inspect.signature(module.forward)
        view = inspect.Parameter("_view", inspect.Parameter.POSITIONAL_ONLY)
        named.__signature__ = signature.replace(parameters=[view, *signature.parameters.values()])
    except (TypeError, ValueError):  # compiled code has none, and what is no function is refused when it is called
        pass
    return forward


def _rewrap(module: nn.Module, fused: Any) -> FusedModule:
    return FusedModule(module, fused.over(module))


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Let what is fused run eagerly for a while, in this thread, hooks of fused modules included.

    For calls that would compile again and again, as each token of a text with one more key than the last. What is fused
    without a view, as an op in a layer with a backend, asks `is_unfused`. Where something is checkpointed, its backward
    belongs within too, since it runs forward again.

    >>> import torch
    >>> from fuselayers import fuse
    >>> layers = nn.Sequential(fuse(nn.Linear(2, 2), backend="eager"))
    >>> with unfused():
    ...     layers(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    outside = _UNFUSED.set(_Unfused(in_checkpoints=True))
    try:
        yield
    finally:
        _UNFUSED.reset(outside)


def call_unfused(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Call a function in which every fused function is the plain one, and say whether there was one.

    Not in a checkpoint within it: that runs again in backward, when this is over, and both must go the same way.
    """
    within = _Unfused(in_checkpoints=False)
    outside = _UNFUSED.set(within)
    try:
        return fn(*args, **kwargs), within.asked
    finally:
        _UNFUSED.reset(outside)


def is_unfused() -> bool:
    """Return whether this thread is within `unfused`.

    >>> with unfused():
    ...     is_unfused()
    True
    >>> is_unfused()
    False
    """
    within = _UNFUSED.get()
    if within is None:
        return False
    within.asked = True
    return within.in_checkpoints or not may_run_again()
