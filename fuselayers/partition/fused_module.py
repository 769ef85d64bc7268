"""FusedModule -- a module's fused twin: its own forward, the same weights."""

import contextlib
import functools
import html
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from .._torch.dispatch import is_compiling
from ..errors import say_once
from .backends import FusionReport

_SHARED: Final = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_load_state_dict_post_hooks",
    # The module saves and loads, not the view.
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


_OF_CONTAINERS: Final = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")

_DISABLED: ContextVar[bool] = ContextVar("_DISABLED", default=False)


class _Forward(property):
    """A view's forward, which can be called through its type too."""

    def __call__(self, view: "FusedModule", /, *args: Any, **kwargs: Any) -> Any:
        return view.forward(*args, **kwargs)


class FusedModule(nn.Module):
    """A fused view of a module. Made by `fuse`.

    It shares the module's parameters, buffers, submodules and train/eval mode, so `parameters()`, `state_dict()`,
    `load_state_dict()`, `to()`, `train()` and hooks of an optimizer see one and the same thing from either side, under
    the module's own names. Other attributes and methods are the module's too, to read and to set, and so are the
    special methods of containers (`len(fused)`, `fused[0]`); only calling it is different. A method that calls `self`
    calls the module, unfused; `generate` of transformers warns of it. Its class is not the module's, so ask
    `isinstance(fused.module, ...)`.

    Attributes:
        module: the module as it was given, which still runs eagerly.
        fused: the fused function that a call goes through.
    """

    module: nn.Module
    fused: Callable[..., Any]

    def __new__(cls, module: nn.Module, fused: Callable[..., Any]) -> "FusedModule":
        # Python looks special methods up in the type, so a view of a container has a type of its own.
        own: dict[str, Any] = {name: _delegated(name) for name in _OF_CONTAINERS if hasattr(type(module), name)}
        # Trainers look up the forward's signature in the type.
        own["forward"] = _Forward(FusedModule.forward.fget)  # type: ignore[attr-defined]
        own["forward"].__signature__ = inspect.signature(_forward_like(module))
        return super().__new__(type(cls.__name__, (cls,), {"__module__": cls.__module__, **own}))

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
        # Dynamo cannot make a method here, and Dynamo 2.11 cannot look the fused function up: it takes any attribute
        # that could be a descriptor for one.
        if torch.compiler.is_dynamo_compiling():
            return self.module
        return MethodType(self.__dict__["_forward_of_view"], self)

    def report(self) -> FusionReport:
        """Return which backend serves each graph of the module that was compiled so far, and why."""
        report: FusionReport = self.__dict__["fused"].report()
        return report

    # Note: [methods that a module may override] nn.Module has these, so that `__getattr__` never sees them; but a
    # module that freezes its batch norm in `train`, or saves more than its parameters, has its own.
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

    # Functions that initialise weights look at the type of each submodule, which must not be the view's.
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
            value = getattr(self.__dict__["module"], name)
        # Models of transformers have `can_generate`; this library's own run unfused on purpose, see `disable_fusion`.
        if name == "generate" and hasattr(self.__dict__["module"], "can_generate"):
            return _unfused_generate(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The view owns what nn.Module's constructor gave it, as hooks. The rest belongs to the module, which is what
        # runs: an option that is set on the view must reach it.
        if name == "parametrizations":
            raise ValueError(
                f"a parametrization must be on the module that runs, got the fused view of it; make "
                f"{type(self.__dict__['module']).__name__} anew and parametrize it before it is fused"
            )
        if name == "__class__":
            # FSDP2 gives a module a class of its own; it must wrap the calls of the view, not those of the module.
            object.__setattr__(self, name, value)
        elif name in self.__dict__ or name == "training":
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["module"], name)

    def extra_repr(self) -> str:
        return f"fused {type(self.__dict__['module']).__name__}"

    def _repr_html_(self) -> str:
        """Return what serves the module and its parts, for a notebook."""
        name = type(self.__dict__["module"]).__name__
        return (
            f"<p><b>fused {html.escape(name)}</b></p><pre>{html.escape(str(self.report()))}</pre>"
            f"<details><summary>parts</summary><pre>{html.escape(repr(self))}</pre></details>"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Hooks, above all. nn.Module does not pickle what its `compile` made either.
        not_own = {*_SHARED, "module", "fused", "_forward_of_view", "_compiled_call_impl"}
        own = {name: value for name, value in self.__dict__.items() if name not in not_own}
        return _rewrap, (self.__dict__["module"], self.__dict__["fused"]), own


def _unfused_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    # A method of the module calls the module itself, not its view.
    @functools.wraps(generate)
    def call(*args: Any, **kwargs: Any) -> Any:
        say_once(
            "generate runs unfused: it calls the module that was given to fuse; to fuse its steps, set "
            "model.forward = fuse(model.forward) and call model.generate"
        )
        return generate(*args, **kwargs)

    return call


def _delegated(name: str) -> Callable[..., Any]:
    def special(view: FusedModule, /, *args: Any) -> Any:
        return getattr(view.__dict__["module"], name)(*args)

    return special


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
    except (TypeError, ValueError):  # compiled code has no signature
        pass
    return forward


def _rewrap(module: nn.Module, fused: Any) -> FusedModule:
    return FusedModule(module, fused.over(module))


@contextlib.contextmanager
def disable_fusion() -> Iterator[None]:
    """Let every fused function and module run eagerly for a while, in this thread; hooks of fused modules run.

    Use it for calls that would recompile often, as in generation, where each token has one more key than the last. If
    something is checkpointed within, run its backward within too, since it recomputes forward.

    >>> import torch
    >>> from fuselayers import fuse
    >>> layers = nn.Sequential(fuse(nn.Linear(2, 2), backend="eager"))
    >>> with disable_fusion():
    ...     layers(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    before = _DISABLED.set(True)
    try:
        yield
    finally:
        _DISABLED.reset(before)


def is_fusion_disabled() -> bool:
    """Return whether this thread is within `disable_fusion`.

    >>> with disable_fusion():
    ...     is_fusion_disabled()
    True
    >>> is_fusion_disabled()
    False
    """
    return _DISABLED.get()
