"""FusedModule -- a module whose forward runs through the fusion core."""

import contextlib
import functools
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, Final, TypeVar

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..module_class import class_before, subclass
from .fusion_report import FusionReport

_Module = TypeVar("_Module", bound=nn.Module)

_DISABLED: Final = ContextVar("_DISABLED", default=False)


class FusedModule(nn.Module):
    """The base class of fused modules. `fuse` and `fuse_in_place` give a module a new class, which derives from the
    module's class and this one.

    So `isinstance`, attributes, methods, hooks and state_dict keys stay those of the module's class. Only `forward` is
    fused: hooks of the module run around it. Copies and pickles are fused, with nothing compiled yet.
    `nn.Module.compile` is not used: it compiles hooks too, its copies and pickles are not compiled, and it has neither
    fallbacks nor a report.
    """

    _fused: ClassVar[Any] = None  # the `FusedFunction` of a class

    def report(self) -> FusionReport:
        """Return which backend serves each graph of the module that was compiled so far, and why."""
        fused: Any = type(self)._fused
        report: FusionReport = fused.report()
        return report


def with_forward(module: _Module, fused: Any) -> _Module:
    """Give a module a class whose forward is a fused function of the module and its arguments.

    Modules that share a fused function share its graphs.
    """
    module.__class__ = _class_of(type(eager_view(module)), fused, "forward" in vars(module))
    return module


def view_of(module: _Module) -> _Module:
    """Return another object with the same attributes; both share one `__dict__`."""
    view = object.__new__(type(module))
    view.__dict__ = module.__dict__
    return view


def eager_view(module: _Module) -> _Module:
    """Return a view of a fused module that runs eagerly; a module that is not fused is returned as it is.

    Both have the same attributes, parameters and mode. Fused modules inside it stay fused; `disable_fusion` covers all.

    >>> from fuselayers import fuse
    >>> layer = fuse(nn.Linear(2, 2), backend="eager")
    >>> type(eager_view(layer)) is nn.Linear, eager_view(layer).weight is layer.weight
    (True, True)
    """
    if not isinstance(module, FusedModule):
        return module
    plain: Any = view_of(module)
    plain.__class__ = class_before(type(module), "fused_from")
    return plain  # type: ignore[no-any-return]


def _class_of(cls: type, fused: Any, is_patched: bool) -> Any:
    """Return the fused class. `is_patched` tells whether the module itself has a forward besides that of its class."""
    # Dynamo's guards compare the class, so modules that share a graph share it.
    if fused.module_class is not None:
        return fused.module_class

    # A plain function, since `torch.export` reads its code.
    @functools.wraps(fused.fn)
    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return fused(module, *args, **kwargs)

    own = {
        "_fused": fused,
        # A `forward` set on the instance would hide the class's, unless the class's is a property.
        "forward": property(lambda self: types.MethodType(forward, self)) if is_patched else forward,
    }
    if issubclass(cls, LazyModuleMixin):
        own["cls_to_become"] = None  # else torch would give the module its plain class once it is initialised
    fused.module_class = subclass(
        cls, own, mark="fused_from", make=_class_of, arguments=(fused, is_patched), mixins=(FusedModule,)
    )
    return fused.module_class


@contextlib.contextmanager
def disable_fusion() -> Iterator[None]:
    """Run every fused function and module eagerly within the block, in this thread. Hooks of fused modules still run.

    `torch.compiler.set_stance("force_eager")` would affect every thread, and every compiled function.

    Use it for calls that would recompile often, as in generation, where each token has one more key than the last. If
    a checkpoint runs within the block, run its backward within the block too, since backward recomputes forward.

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
    """Return whether this thread is within `disable_fusion`."""
    return _DISABLED.get()
