"""The fused function: its compiled graphs, and the backend that serves each."""

import copy
import dataclasses
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from .._torch.dispatch import is_compiling, tangents_are_active
from .._torch.guards import inner_error, torch_compile
from ..errors import BackendUnavailableError
from ..names import no_such
from .backends import compile_chain, graph_name
from .choose.partitioners import Partitioner, partitioner
from .fused_method import FusedMethod
from .fused_module import is_fusion_disabled
from .fusion_report import FusionReport, GraphReport
from .joint_graph import PartitionError

# Dynamo's own limit is 8 graphs for one function, after which it logs a warning and runs eager.
_RECOMPILE_LIMIT: Final = 64

_numbers: Final = itertools.count()


@dataclass(frozen=True, kw_only=True)
class FuseOptions:
    """The arguments of `fuse`, checked. An attribute that is not listed is as in `fuse`.

    Attributes:
        chain: the backends to try, in order.
        own_errors: errors that a call raises unwrapped. Dynamo wraps a backend's error in advice about Dynamo's
            settings.
    """

    own_errors: ClassVar[tuple[type[Exception], ...]] = (BackendUnavailableError, PartitionError)

    backend: str
    chain: tuple[str, ...]
    partition: str | Partitioner
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    dynamic: bool | None = None
    fullgraph: bool = False
    torch_random: bool = False

    def __post_init__(self) -> None:
        partitioner(self.partition)  # an unknown name raises here, not at the first call
        for kind, static in (("static_argnums", self.static_argnums), ("static_argnames", self.static_argnames)):
            wanted = int if kind == "static_argnums" else str
            wrong = [entry for entry in static if type(entry) is not wanted]
            if wrong:
                what = "positions" if wanted is int else "names"
                raise TypeError(f"{kind} must be {what} of arguments, got {wrong[0]!r}")
        if self.dynamic not in (None, True, False):
            raise TypeError(f"dynamic must be None, True or False, got {self.dynamic!r}")

    def compile(
        self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], str, str]:
        """Compile a Dynamo graph; return the compiled graph, its backend, and why this backend serves it."""
        compiled, served_by, why = compile_chain(
            graph_module,
            example_inputs,
            chain=self.chain,
            partition=self.partition,
            torch_random=self.torch_random,
        )
        return compiled, served_by, why or ("the first that works" if self.backend == "auto" else "as asked")


class FusedFunction:
    """A function that runs through the fusion core. Made by `fuse`; called like the function it wraps.

    Attributes:
        fn: the wrapped function, which is itself not fused.
        options: the arguments of `fuse`.
        owner: the class of the modules whose forward `fn` is, or None.
        module_class: the class of these modules once they are fused.
        name: the name of the function or the class, for reports.
        served_by: the backends that serve the graphs compiled so far, each once, in order of first use.
    """

    def __init__(self, fn: Callable[..., Any], *, options: FuseOptions, owner: type[nn.Module] | None = None) -> None:
        while isinstance(fn, FusedFunction):
            fn = fn.fn
        # Before the attributes below: if `fn` wraps a fused function, this copies that function's attributes.
        if not isinstance(fn, nn.Module):  # `aot_function` may pass a module
            functools.update_wrapper(self, fn)
        self.fn: Callable[..., Any] = fn
        self.owner = owner
        self.module_class: type[nn.Module] | None = None
        self.options = options
        self._graphs: list[GraphReport] = []
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._static_argnums, self._static_argnames = _static_both_ways(fn, options)
        self._has_static = bool(options.static_argnums or options.static_argnames)
        # Used without static arguments. Set at the first call, since `torch.compile` reads some of torch's settings.
        self._only: Callable[..., Any] | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Another compiler traces the plain function. Compiled code does not support forward-mode tangents.
        if is_compiling() or is_fusion_disabled() or tangents_are_active():
            return self.fn(*args, **kwargs)
        compiled = self._only
        if compiled is None and self._has_static:
            compiled, args, kwargs = self._specialised(args, kwargs)
        elif compiled is None:
            compiled = self._only = self._compile_for((), {})
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            inner = inner_error(error)
            if inner is not error and isinstance(inner, self.options.own_errors):
                raise inner from inner.__cause__
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else FusedMethod(self, instance)

    def _specialised(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function that is compiled for the static arguments, and the other arguments."""
        positions = {index % len(args) for index in self._static_argnums if -len(args) <= index < len(args)}
        static = tuple((index, args[index]) for index in sorted(positions))
        named = {name: value for name, value in kwargs.items() if name in self._static_argnames}
        rest = tuple(value for index, value in enumerate(args) if index not in positions)
        named_rest = {name: value for name, value in kwargs.items() if name not in named}
        return self._compile_for(static, named), rest, named_rest

    def _compile_for(self, static: tuple[tuple[int, Any], ...], named: dict[str, Any]) -> Callable[..., Any]:
        try:
            key = _key_of(static), _key_of(tuple(sorted(named.items())))
            compiled = self._compiled.get(key)
        except TypeError as error:
            raise TypeError(
                f"a static argument must be hashable ({error}); pass a tuple, or leave it dynamic"
            ) from None
        if compiled is None:
            if any(isinstance(value, torch.Tensor) for _, value in (*static, *named.items())):
                raise TypeError("a static argument becomes a constant of the graph, got a tensor; leave it dynamic")
            # Dynamo keeps each backend until `torch.compiler.reset()`. It must not keep this function and its weights.
            method: Any = weakref.WeakMethod(self._backend)
            compiled = torch_compile(
                _with_static_arguments(self.fn, dict(static), named),
                name=_name_in_dynamo(self, has_values=bool(static or named)),
                backend=lambda graph_module, example_inputs: method()(graph_module, example_inputs),
                recompile_limit=_RECOMPILE_LIMIT,
                dynamic=self.options.dynamic,
                fullgraph=self.options.fullgraph,
            )
            self._compiled[key] = compiled
        return compiled

    def _backend(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        name = graph_name(graph_module, function=self.name, partition=self.options.partition)
        compiled, served_by, reason = self.options.compile(graph_module, example_inputs)
        self._graphs.append(GraphReport(name, served_by, reason))
        return compiled

    def report(self) -> FusionReport:
        """Return which backend serves each graph compiled so far, and why. The report's text has a line for each graph.

        >>> from fuselayers.partition.fuse import fuse
        >>> @fuse(backend="eager")
        ... def double(x):
        ...     return x * 2
        >>> _ = double(torch.ones(3))
        >>> print(double.report())
        double(float32[3]) forward: eager, as asked
        """
        return FusionReport(tuple(self._graphs))

    @property
    def name(self) -> str:
        return getattr(self.owner or self.fn, "__name__", type(self.fn).__name__)

    @property
    def served_by(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(graph.served_by for graph in self._graphs))

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedFunction":
        return FusedFunction(copy.deepcopy(self.fn, memo), options=self.options, owner=self.owner)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # pickle finds a decorated function by its name.
        name = getattr(self, "__qualname__", "")
        named: Any = sys.modules.get(getattr(self, "__module__", ""))
        for attribute in name.split("."):
            named = getattr(named, attribute, None)
        if named is self:
            return str(name)
        return functools.partial(FusedFunction, options=self.options, owner=self.owner), (self.fn,)


def _static_both_ways(fn: Callable[..., Any], options: FuseOptions) -> tuple[frozenset[int], frozenset[str]]:
    """Return the static arguments by position and by name. Where the signature can be read, each is in both."""
    numbers, names = frozenset(options.static_argnums), frozenset(options.static_argnames)
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return numbers, names
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [parameter for parameter in parameters if parameter.kind in (parameter.POSITIONAL_ONLY, either)]
    # A decorated function has two signatures. Validate static arguments against the wrapper's own; take the positions
    # from the wrapped function's, since the wrapper's is often `*args, **kwargs`.
    own = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn, follow_wrapped=False).parameters.values()
    kinds = {parameter.kind for parameter in own}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        known = [parameter.name for parameter in own]
        for name in options.static_argnames:
            if name not in known:
                raise ValueError(no_such("argument to be static", name, known))
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        places = sum(parameter.kind in (parameter.POSITIONAL_ONLY, either) for parameter in own)
        for number in options.static_argnums:
            if not -places <= number < places:
                raise ValueError(f"static_argnums has {number}, and the function takes {places} arguments by position")
    if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters):
        numbers = frozenset(index + len(positional) if index < 0 else index for index in numbers)
    static = [index for index, parameter in enumerate(positional) if index in numbers or parameter.name in names]
    by_name = (positional[index].name for index in static if positional[index].kind is either)
    return numbers.union(static), names.union(by_name)


def _key_of(value: Any) -> Hashable:
    """Return a key that differs for equal values that make different graphs: 1, 1.0 and True, or 0.0 and -0.0, also in
    tuples and dataclasses. Other equal values share a graph."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = (getattr(value, field.name) for field in dataclasses.fields(value) if field.compare)
        # The hash as well: a dataclass may define how it compares, or not be hashable.
        return (type(value), hash(value), *map(_key_of, compared))
    if isinstance(value, tuple):
        return type(value), *map(_key_of, value)
    if isinstance(value, frozenset):
        return type(value), frozenset(map(_key_of, value))
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value.hex() if isinstance(value, float) else value


def _with_static_arguments(fn: Callable[..., Any], static: dict[int, Any], named: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of the remaining arguments."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def entry_with_values(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        merged = [static[index] if index in static else next(rest) for index in range(len(static) + len(args))]
        return fn(*merged, **kwargs, **named)

    if static or named:
        entry = entry_with_values
    if not isinstance(fn, nn.Module):
        entry.__doc__ = inspect.getdoc(fn)
    return entry


def _name_in_dynamo(fused: FusedFunction, *, has_values: bool) -> str:
    """Return a name under which Dynamo keeps the sizes and numbers of this function apart from others'.

    Each set of static arguments has another name. Under one name Dynamo would make a symbol of a second value.
    """
    own_code = getattr(inspect.unwrap(fused.fn), "__code__", None)
    line = f"_at_{own_code.co_firstlineno}_of_{Path(own_code.co_filename).stem}" if own_code else ""
    return f"fused_{fused.name}{line}" + (f"_with_values_{next(_numbers)}" if has_values else "")
