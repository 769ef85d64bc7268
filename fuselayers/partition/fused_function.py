"""The fused function: its compiled graphs, and the backend that serves each."""

import copy
import functools
import itertools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch.fx as fx
from torch import nn

from .._torch.dispatch import is_compiling, is_recorded, tangents_are_active
from .._torch.guards import compilations_of_frame, inner_error, torch_compile
from ..errors import BackendUnavailableError
from ..names import name_of
from .backends import check_backends, compile_chain
from .choose.partitioners import Partitioner, SavePolicy, partitioner
from .fused_method import FusedMethod
from .fused_module import fusion_disabled
from .fusion_report import FusionReport, GraphInputs, GraphReport
from .joint_graph import PartitionError

# Dynamo's own limit is 8 graphs for one function, after which it logs a warning and runs eager.
_RECOMPILE_LIMIT: Final = 64
_MANY_COMPILATIONS: Final = 8

_numbers: Final = itertools.count()


@dataclass(frozen=True, kw_only=True)
class FuseOptions:
    """The arguments of `fuse`, checked.

    Attributes:
        own_errors: errors that a call raises unwrapped. Dynamo wraps a backend's error in advice about Dynamo's
            settings.
    """

    own_errors: ClassVar[tuple[type[Exception], ...]] = (BackendUnavailableError, PartitionError)

    backend: str = "auto"
    partition: str | Partitioner = "min_cut"
    compress: str | None = None
    fallback: Sequence[str] = ("inductor", "eager")
    dynamic: bool | None = None
    fullgraph: bool = False
    torch_random: bool = False
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        _ = self.chain, self.cut  # an unknown name raises here, not at the first call
        if self.dynamic not in (None, True, False):
            raise TypeError(f"dynamic must be None, True or False, got {self.dynamic!r}")

    @functools.cached_property
    def chain(self) -> tuple[str, ...]:
        """The backends to try, in order."""
        return check_backends(self.backend, self.fallback)

    @functools.cached_property
    def cut(self) -> Partitioner:
        """The partitioner, with its compression."""
        return partitioner(self.partition, compress=self.compress)

    def compile(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], str, str]:
        """Compile a Dynamo graph; return the compiled graph, its backend, and why this backend serves it."""
        compiled, served_by, why = compile_chain(
            graph_module,
            example_inputs,
            chain=self.chain,
            partition=self.cut,
            torch_random=self.torch_random,
            cuda_graphs=self.cuda_graphs,
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
        self.name = name_of(owner or fn)
        self.module_class: type[nn.Module] | None = None
        self.options = options
        self._graphs: list[tuple[GraphInputs, str, str]] = []  # each with its backend, and why this backend serves it
        # Set at the first call, since `torch.compile` reads some of torch's settings.
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Another compiler or tracer gets the plain function. Compiled code does not support forward-mode tangents.
        if is_compiling() or is_recorded() or fusion_disabled.get() or tangents_are_active():
            return self.fn(*args, **kwargs)
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = self._compile()
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            inner = inner_error(error)
            if inner is not error and isinstance(inner, self.options.own_errors):
                raise inner from inner.__cause__
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else FusedMethod(self, instance)

    def _compile(self) -> Callable[..., Any]:
        fn = self.fn
        # Dynamo keeps each backend until `torch.compiler.reset()`. It must not keep this function and its weights.
        this: Any = weakref.ref(self)

        def entry(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        # Dynamo reads the globals of functions that it inlines from their module. What cloudpickle sent has globals
        # of its own, which Dynamo finds only if they are also those of the function that it compiles.
        own, module = getattr(fn, "__globals__", None), sys.modules.get(getattr(fn, "__module__", None) or "")
        if own is not None and own is not getattr(module, "__dict__", None):
            entry = types.FunctionType(entry.__code__, own, closure=entry.__closure__)

        def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            fused: FusedFunction = this()
            inputs = GraphInputs.of(graph_module)  # before compiling, which may change the graph
            compiled, served_by, reason = fused.options.compile(graph_module, example_inputs)
            fused._graphs.append((inputs, served_by, reason))
            if compilations_of_frame() == _MANY_COMPILATIONS:
                warnings.warn(
                    f"{fused.name} was compiled {_MANY_COMPILATIONS} times, since a size, a dtype, a mode or a Python "
                    "number changes from call to call; TORCH_LOGS=recompiles prints the reasons",
                    stacklevel=2,
                )
            return compiled

        return torch_compile(
            entry,
            # Under one name Dynamo would share what it knows of sizes and numbers that change between functions.
            name=f"fused_{self.name}_{next(_numbers)}",
            backend=compile_graph,
            recompile_limit=_RECOMPILE_LIMIT,
            dynamic=self.options.dynamic,
            fullgraph=self.options.fullgraph,
        )

    def report(self) -> FusionReport:
        """Return which backend serves each graph compiled so far, and why. The report's text has a line for each graph.

        >>> import torch
        >>> from fuselayers.partition.fuse import fuse
        >>> @fuse(backend="eager")
        ... def double(x):
        ...     return x * 2
        >>> _ = double(torch.ones(3))
        >>> print(double.report())
        double(float32[3]) forward: eager, as asked
        """
        how = _words_of(self.options)
        return FusionReport(
            tuple(
                GraphReport(f"{self.name}{inputs}{how}", served_by, reason)
                for inputs, served_by, reason in self._graphs
            )
        )

    @property
    def served_by(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(served_by for _, served_by, _ in self._graphs))

    def __repr__(self) -> str:
        return f"<fused function {self.name}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedFunction":
        return FusedFunction(copy.deepcopy(self.fn, memo), options=self.options, owner=self.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        if _by_name(self.__dict__.get("__module__"), self.__dict__.get("__qualname__")) is self:
            return _unpickled, (self._remake,)
        return functools.partial(FusedFunction, options=self.options, owner=self.owner), (self.fn,)

    @functools.cached_property
    def _remake(self) -> Callable[[], "FusedFunction"]:
        """A function that makes an equal one, under the name of an attribute of this one.

        pickle stores a function as its name. cloudpickle and joblib, which send work to other processes, store the code
        if the module cannot be imported there, but only of a real function. So a decorated function is stored as this
        one.
        """
        fn, options, owner = self.fn, self.options, self.owner

        def remake() -> FusedFunction:
            return FusedFunction(fn, options=options, owner=owner)

        remake.__module__, remake.__qualname__ = self.__module__, f"{vars(self)['__qualname__']}._remake"
        return remake


def _unpickled(remake: Callable[[], FusedFunction]) -> FusedFunction:
    named = _by_name(remake.__module__, remake.__qualname__.removesuffix("._remake"))
    return named if isinstance(named, FusedFunction) and named._remake is remake else remake()


def _by_name(module: str | None, qualified_name: str | None) -> Any:
    value: Any = sys.modules.get(module or "")
    for name in (qualified_name or "").split("."):
        value = getattr(value, name, None)
    return value


def _words_of(options: FuseOptions) -> str:
    """Return how the graphs are cut, for a report; the default has no words."""
    cut = options.cut
    if isinstance(cut, SavePolicy) and cut.compress is not None:
        return f", {cut.name} in {cut.compress}"
    if isinstance(options.partition, str):
        return "" if options.partition == "min_cut" else f", {options.partition}"
    return ", own partition"
