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

import torch
import torch.fx as fx
from torch import nn

from .._torch.dispatch import is_compiling, is_recorded, tangents_are_active
from .._torch.guards import compilations_of_frame, inner_error, torch_compile
from ..errors import BackendUnavailableError
from ..names import name_of
from .backends import check_backends, compile_chain
from .choose.partitioners import Partitioner, SavePolicy, partitioner
from .fused_method import FusedMethod
from .fused_module import is_fusion_disabled
from .fusion_report import FusionReport, GraphReport
from .joint_graph import PartitionError

# Dynamo's own limit is 8 graphs for one function, after which it logs a warning and runs eager.
_RECOMPILE_LIMIT: Final = 64
_MANY_COMPILATIONS: Final = 8
_SHOWN_INPUTS: Final = 3

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

    @property
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
        self.module_class: type[nn.Module] | None = None
        self.options = options
        self._graphs: list[GraphReport] = []
        # Set at the first call, since `torch.compile` reads some of torch's settings.
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Another compiler or tracer gets the plain function. Compiled code does not support forward-mode tangents.
        if is_compiling() or is_recorded() or is_fusion_disabled() or tangents_are_active():
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

        def entry(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        # Dynamo reads the globals of functions that it inlines from their module. What cloudpickle sent has globals
        # of its own, which Dynamo finds only if they are also those of the function that it compiles.
        own, module = getattr(fn, "__globals__", None), sys.modules.get(getattr(fn, "__module__", None) or "")
        if own is not None and own is not getattr(module, "__dict__", None):
            entry = types.FunctionType(entry.__code__, own, closure=entry.__closure__)
        # Dynamo keeps each backend until `torch.compiler.reset()`. It must not keep this function and its weights.
        method: Any = weakref.WeakMethod(self._backend)
        return torch_compile(
            entry,
            # Under one name Dynamo would share what it knows of sizes and numbers that change between functions.
            name=f"fused_{self.name}_{next(_numbers)}",
            backend=lambda graph_module, example_inputs: method()(graph_module, example_inputs),
            recompile_limit=_RECOMPILE_LIMIT,
            dynamic=self.options.dynamic,
            fullgraph=self.options.fullgraph,
        )

    def _backend(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        name = self._graph_name(graph_module)  # before compiling, which may change the graph
        compiled, served_by, reason = self.options.compile(graph_module, example_inputs)
        self._graphs.append(GraphReport(name, served_by, reason))
        if compilations_of_frame() == _MANY_COMPILATIONS:
            warnings.warn(
                f"{self.name} was compiled {_MANY_COMPILATIONS} times, since a size, a dtype, a mode or a Python "
                "number changes from call to call; TORCH_LOGS=recompiles prints the reasons",
                stacklevel=2,
            )
        return compiled

    def _graph_name(self, graph_module: fx.GraphModule) -> str:
        """Return the name of a Dynamo graph in reports."""
        inputs = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        kinds = [f"{str(tensor.dtype).removeprefix('torch.')}{_sizes(tensor)}" for tensor in tensors[:_SHOWN_INPUTS]]
        kinds += [f"{len(tensors) - _SHOWN_INPUTS} more"] if len(tensors) > _SHOWN_INPUTS else []
        partition, cut = self.options.partition, self.options.cut
        if isinstance(cut, SavePolicy) and cut.compress is not None:
            how = f", {cut.name} in {cut.compress}"
        elif isinstance(partition, str):
            how = "" if partition == "min_cut" else f", {partition}"
        else:
            how = ", own partition"
        return f"{self.name}({', '.join(kinds)}) {'training' if training else 'forward'}{how}"

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
        return name_of(self.owner or self.fn)

    @property
    def served_by(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(graph.served_by for graph in self._graphs))

    def __repr__(self) -> str:
        return f"<fused function {self.name}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedFunction":
        return FusedFunction(copy.deepcopy(self.fn, memo), options=self.options, owner=self.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        if _by_name(self.__dict__.get("__module__"), self.__dict__.get("__qualname__")) is self:
            return _unpickled, (self._again,)
        return functools.partial(FusedFunction, options=self.options, owner=self.owner), (self.fn,)

    @functools.cached_property
    def _again(self) -> Callable[[], "FusedFunction"]:
        """A function that makes this one again, under the name of an attribute of it.

        pickle stores a function as its name. cloudpickle and joblib, which send work to other processes, store the code
        if the module cannot be imported there, but only of a real function. So a decorated function is stored as this
        one.
        """
        fn, options, owner = self.fn, self.options, self.owner

        def again() -> FusedFunction:
            return FusedFunction(fn, options=options, owner=owner)

        again.__module__, again.__qualname__ = self.__module__, f"{vars(self)['__qualname__']}._again"
        return again


def _unpickled(again: Callable[[], FusedFunction]) -> FusedFunction:
    named = _by_name(again.__module__, again.__qualname__.removesuffix("._again"))
    return named if isinstance(named, FusedFunction) and named._again is again else again()


def _by_name(module: str | None, qualified_name: str | None) -> Any:
    value: Any = sys.modules.get(module or "")
    for name in (qualified_name or "").split("."):
        value = getattr(value, name, None)
    return value


def _sizes(tensor: torch.Tensor) -> str:
    """Return the sizes as text, with a * for each symbolic size."""
    return f"[{', '.join(str(size) if type(size) is int else '*' for size in tensor.shape)}]"
