"""functorch -- functorch's names: trace forward and backward ahead of time, and hand each to your compiler.

As in `fuse`, Dynamo's guards protect each graph. The functions in functorch have no guards: they run the first call's
graph for any shape, mode and Python value. Behind the guards AOTAutograd calls the partitioner with the joint graph,
and each compiler with one graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import torch.fx as fx
from torch import nn

from .._torch.tracing import aot_autograd, boxed, forget_donated_buffers, of_one_list
from ..errors import warn_once
from ..names import name_of
from .choose.partitioners import Partitioner, default, min_cut
from .fuse import fuse, fuse_with
from .fused_function import FusedFunction, FuseOptions

_Module = TypeVar("_Module", bound=nn.Module)

default_partition: Final = default
"""functorch's name for `default`."""

min_cut_rematerialization_partition: Final = min_cut
"""functorch's name for `min_cut`, which uses prices where functorch's uses a list of ops, `recomputable_ops`."""

GraphCompiler: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Takes one graph of ATen ops and example inputs (fake tensors), and returns a function to call in its place: of
the graph's inputs, or of one list of them if it has been through `functorch.compile.make_boxed_func`."""


def memory_efficient_fusion(
    fn: Any = None, /, *, static_argnums: int | Sequence[int] | None = None, **options: Any
) -> Any:
    """Call `fuse`, under functorch's name. Unlike functorch's, it has guards: a new shape or mode gets a new graph.

    Args:
        fn: as in `fuse`.
        static_argnums: functorch's positions of Python values. If there are any, `dynamic=False` is the default: each
            value gets its own graph, at whatever position, and each shape too, up to 64 graphs.
        options: as in `fuse`.

    >>> import torch
    >>> def summed(x, dim):
    ...     return x.sum(dim)
    >>> fused = memory_efficient_fusion(summed, static_argnums=(1,), backend="eager")
    >>> fused(torch.ones(2, 3), 0), fused(torch.ones(2, 3), 1)
    (tensor([2., 2., 2.]), tensor([3., 3.]))
    """
    if static_argnums is not None and static_argnums not in ((), []):
        options.setdefault("dynamic", False)
    return fuse(fn, **options)


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: GraphCompiler,
    bw_compiler: GraphCompiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    dynamic: bool | None = False,
) -> FusedFunction:
    """Return `fn` with its forward and backward graphs traced ahead of time and compiled by functions of yours.

    Each new combination of shapes, dtypes, modes and Python values is traced and compiled again, at most 64 times, as
    in `fuse`. If part of `fn` cannot be traced, `fn` is split, and each part has its own graphs. A graph has the inputs
    that the function uses, in the order of first use. torch's random ops draw eager's numbers. Inside another
    compiler, or inside `fuse`, the plain function is traced.

    Args:
        fn: a function of tensors. `aot_module` is for modules.
        fw_compiler: compiles the forward graph, and the graph of a call that needs no gradients. It takes the graph and
            example inputs, and returns a function to call instead, or the graph: `lambda graph, inputs: graph`.
        bw_compiler: the same for the backward graph; None takes `fw_compiler`.
        partition_fn: cuts the joint graph in two, as `fuse(partition=...)`.
        decompositions: a function for each ATen op to decompose, as `torch._decomp.get_decompositions` returns them.
        static_argnums: functorch's positions of Python values; not used, since with `dynamic=False` each value has its
            own graph.
        dynamic: False traces each shape and Python value separately; None makes a size symbolic when it changes; True
            from the start.

    Raises:
        TypeError: `fn` or a compiler is not callable; or (at the call) a compiler's result is not callable.
        ValueError: an unknown partitioner.

    The call that compiles raises the errors of a compiler or a partitioner.

    >>> import torch
    >>> from fuselayers.partition import print_compile
    >>> double_sine = aot_function(lambda x: x.sin() * 2, print_compile)
    >>> double_sine(torch.zeros(3))
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    def forward(self, arg0_1):
        sin = torch.ops.aten.sin.default(arg0_1);  arg0_1 = None
        mul = torch.ops.aten.mul.Tensor(sin, 2);  sin = None
        return (mul,)
    <BLANKLINE>
    tensor([0., 0., 0.])
    """
    if not callable(fn):
        raise TypeError(f"aot_function takes a function, got {type(fn).__name__}")
    compilers = {"fw_compiler": fw_compiler, "bw_compiler": bw_compiler or fw_compiler}
    for role, compiler in compilers.items():
        if not callable(compiler):
            raise TypeError(
                f"{role} must be a function of a graph and its inputs, got {compiler!r}; "
                "to choose a backend by name, write fuse(fn, backend='inductor')"
            )
    options = AotOptions(
        partition=partition_fn,
        dynamic=dynamic,
        torch_random=True,
        compilers=compilers,
        decompositions=decompositions,
    )
    return FusedFunction(fn, options=options)


def aot_module(mod: _Module, *args: Any, **kwargs: Any) -> _Module:
    """Return a view of a module that runs through `aot_function`; the module itself stays as it is.

    Args:
        mod: the module. The view shares its parameters, buffers, mode and state_dict keys.
        args: those of `aot_function`, from `fw_compiler` on.
        kwargs: the same by name.

    Raises:
        TypeError: `mod` is not a module; or as `aot_function`.
        ValueError: as `aot_function`.

    >>> import torch
    >>> layer = nn.Linear(4, 2)
    >>> aot_layer = aot_module(layer, lambda graph, inputs: graph)
    >>> aot_layer(torch.ones(3, 4)).sum().backward()
    >>> layer.bias.grad
    tensor([3., 3.])
    """
    if not isinstance(mod, nn.Module):
        raise TypeError(f"aot_module takes a module, got {type(mod).__name__}; aot_function is for functions")
    options = aot_function(mod.forward, *args, **kwargs).options
    return fuse_with(options, mod)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class AotOptions(FuseOptions):
    """The arguments of `aot_function`, checked."""

    # The user wrote the compilers, so their errors are raised unwrapped.
    own_errors: ClassVar[tuple[type[Exception], ...]] = (Exception,)

    backend: str = "aot_function"
    compilers: Mapping[str, GraphCompiler]  # by "fw_compiler" and "bw_compiler"
    decompositions: Mapping[Any, Callable[..., Any]] | None

    @property
    def chain(self) -> tuple[str, ...]:
        return ()  # these compilers are no named backends

    def compile(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], str, str]:
        backend = aot_autograd(
            keep_unused_draws=True,
            partition_fn=self.cut,
            decompositions=None if self.decompositions is None else dict(self.decompositions),
            **{role: _boxed(role, compiler) for role, compiler in self.compilers.items()},
        )
        served_by = ", ".join(dict.fromkeys(map(name_of, self.compilers.values())))
        return backend(graph_module, example_inputs), served_by, "as given"


def _boxed(role: str, compiler: GraphCompiler) -> GraphCompiler:
    """Wrap a compiler so that it returns a function of one list, as AOTAutograd needs."""

    def compile_boxed(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_donated_buffers()
        run = compiler(graph_module, example_inputs)
        if not callable(run):
            raise TypeError(f"{role} must return a function to call in place of the graph, or the graph; got {run!r}")
        return of_one_list(run)

    return compile_boxed


def print_compile(fx_g: fx.GraphModule, _: Any) -> fx.GraphModule:
    """Print the graph's code, and return the graph to run as it is. `aot_function` shows an example."""
    print(fx_g.code)
    return fx_g


def ts_compile(fx_g: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
    """Run the graph op by op, and say once what replaces functorch's TorchScript compiler."""
    warn_once(
        "ts_compile: PyTorch no longer develops TorchScript's fusers, so the graph runs op by op; "
        "write fuse(fn, backend='inductor') instead of aot_function(fn, ts_compile, ...)"
    )
    return boxed(fx_g)
