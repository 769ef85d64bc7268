"""dispatch -- choose the implementation of a call. Used by every op that has kernels.

    formula     plain torch, op by op; compilers and the transforms of `torch.func` trace it
    kernels     in Triton for a GPU, or Triton's interpreter; in C++ for a CPU, built when the package is installed

The values of `backend`:

    "auto"      the formula inside a compiled function, under a transform of `torch.func`, in `torch.jit.trace`, for
                tensor subclasses, in float64, and on a GPU for small norms (`normalise.call`); else the kernels, on a
                CPU where they win (`Op`).
                `fuse(backend="triton")` takes the kernels of a GPU inside a compiled function too
    "eager"     the formula
    "cpp"       the kernels of a CPU, inside a compiled function too
    "triton"    the kernels of a GPU, inside a compiled function too

All implementations agree to rounding and draw the same mask. The choice depends on the arguments and on torch's
settings, never on a measurement, so numerics do not depend on the clock.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from ..._torch.dispatch import (
    PLAIN_TENSORS,
    OpOverload,
    is_compiling,
    is_dynamo_tracing,
    is_wrapper,
    jit_is_tracing,
    transforms_are_active,
)
from ..._torch.guards import outside_dynamo
from ...errors import BackendUnavailableError
from ...names import no_such
from ...sources import sources_hash
from ..cpu import has_kernels
from .launch import INTERPRETED, why_no_kernels
from .own_kernels import takes_own_kernels

BACKENDS: Final = ("auto", "eager", "cpp", "triton")
_CPU_KERNELS_FROM: Final = 1 << 16
"""Elements from which the kernels in C++ beat plain torch where nothing is dropped."""

_NARROWEST: Final = 16  # columns from which the kernels in C++ beat plain torch where nothing is dropped
WIDEST: Final = (1 << 31) - (1 << 16)  # kernels count columns in 32 bits, and their last tiles lie beyond the row
KERNEL_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})

_library = torch.library.Library("fuselayers", "FRAGMENT")  # type: ignore[no-untyped-call]
_nodes: dict[str, OpOverload] = {}


class Op:
    """An op with kernels: its formula, and a function that runs the kernels.

    On a GPU Dynamo records a call as one node, and the compiler of the graph decides what the node becomes.
    `fuse(backend="triton")` takes `fused`, except for tensor subclasses and under transforms of `torch.func`. Every
    other compiler takes `formula`. A graph that runs without a compiler calls the op as in eager mode, but takes the
    kernels for small norms too.

    On a CPU compilers take `formula`, which they fuse with its neighbours. An op that they could not fuse, such as an
    attention, is one node there too, and in every graph the kernels of its device run in it.

    Args:
        name: the name of the node.
        formula: the op in plain torch; its annotations are the node's schema.
        fused: the same op, with gradients, through the ops that `define` returned.
        cpu_from: the number of elements of the first tensor from which "auto" takes the kernels in C++. With a seed
            "auto" takes them at any size: the formula's mask costs more than a call. At 0 it does without too.
        in_graphs: whether all compiled functions take the kernels, as opaque ops.
    """

    def __init__(
        self,
        name: str,
        formula: Callable[..., Any],
        fused: Callable[..., Any],
        *,
        cpu_from: int = _CPU_KERNELS_FROM,
        in_graphs: bool = False,
    ) -> None:
        self._formula, self._fused, self._cpu_from = formula, fused, cpu_from
        self._in_graphs = in_graphs
        parameters = list(inspect.signature(formula).parameters)
        self._seed = parameters.index("seed") if "seed" in parameters else None
        # Without defaults: torch omits arguments that are equal to their defaults, and `fused` needs all of them.
        schema = re.sub("=[^,)]+", "", torch.library.infer_schema(formula, mutates_args=()))
        assert "[" not in schema, "a list has commas of its own"
        self._num_tensors = schema.partition(")")[0].count("Tensor")
        # torch's cache on disk identifies an op by its name, not by its code.
        own_name, name = name, f"{name}_node_{sources_hash()[:8]}"
        _library.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
        _library.impl(name, self._run_node, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
        self._node = _nodes[own_name] = getattr(torch.ops.fuselayers, name).default

    def __call__(
        self,
        backend: str,
        tensors: Sequence[Tensor | None],
        options: tuple[Any, ...] = (),
        *,
        torch_is_as_fast: bool = False,
        torch_is_faster_below: int = 0,
        unsupported_reason: str | None = None,
    ) -> Any:
        """Call one of the implementations with the tensors and the options.

        Args:
            backend: one of BACKENDS.
            tensors: the first arguments. The first tensor determines the device.
            options: the other arguments.
            torch_is_as_fast: True where plain torch is as fast on a CPU at every size, if nothing is dropped.
            torch_is_faster_below: the number of elements below which "auto" takes the formula on a GPU, because a call
                takes the host longer than the kernels take the GPU.
            unsupported_reason: why the Triton kernels cannot take this call, or None if they can.

        Raises:
            ValueError: no such backend.
            BackendUnavailableError: the backend cannot run here.
            RuntimeError: the backend cannot take this call; the message says why.
        """
        first = tensors[0]
        assert first is not None
        if backend == "auto" and is_dynamo_tracing() and is_on_gpu(first):
            leaves_node = (unsupported_reason or _unsupported_reason(tensors)) is None
            return (self._node if leaves_node else self._formula)(*tensors, *options)
        if backend == "auto" and self._in_graphs and _records_a_graph(tensors) and self._kernels_in_graphs(first):
            fits = runs_cpp(tensors) if first.is_cpu else (unsupported_reason or _unsupported_reason(tensors)) is None
            if fits:
                return self._node(*tensors, *options)
        if not self.takes_kernels(
            backend,
            tensors,
            torch_is_as_fast=torch_is_as_fast,
            torch_is_faster_below=torch_is_faster_below,
            unsupported_reason=unsupported_reason,
        ):
            return self._formula(*tensors, *options)
        return self._fused(*(without_repeats(tensors) if is_compiling() else tensors), *options)

    def takes_kernels(
        self,
        backend: str,
        tensors: Sequence[Tensor | None],
        *,
        torch_is_as_fast: bool = False,
        torch_is_faster_below: int = 0,
        unsupported_reason: str | None = None,
    ) -> bool:
        """Return whether a call with these arguments takes the kernels, where Dynamo does not trace it."""
        first = tensors[0]
        assert first is not None
        if backend == "auto" and first.is_cpu:
            # Inside a compiler a condition on a size would become a guard, so `is_compiling` comes first.
            return (
                not is_compiling()
                and (self._drops(tensors) or (not torch_is_as_fast and self._is_large(first)))
                and runs_cpp(tensors)
            )
        return uses_kernels(backend, *tensors, unsupported_reason=unsupported_reason) and (
            backend != "auto" or first.numel() >= torch_is_faster_below
        )

    def _drops(self, tensors: Sequence[Tensor | None]) -> bool:
        return self._seed is not None and tensors[self._seed] is not None

    def _is_large(self, first: Tensor) -> bool:
        # A kernel works row by row, and each row has a fixed cost.
        return not self._cpu_from or (first.numel() >= self._cpu_from and first.shape[-1] >= _NARROWEST)

    def _run_node(self, *arguments: Any) -> Any:
        takes_kernels = self._kernels_in_graphs(arguments[0])
        if takes_kernels and not (transforms_are_active() or any(map(is_wrapper, arguments))):
            return self._fused(*arguments)
        return self("auto", arguments[: self._num_tensors], arguments[self._num_tensors :])

    def _kernels_in_graphs(self, first: Tensor) -> bool:
        """Return whether the graph that is compiled takes the kernels of a tensor's device."""
        if (
            self._in_graphs
            and not INTERPRETED
            and (first.is_cpu or (is_on_gpu(first) and not why_no_kernels(first.device)))
        ):
            return True
        # Dynamo cannot trace the context variable. No compiler has set it yet when Dynamo traces.
        return not is_dynamo_tracing() and takes_own_kernels()


def node_of(name: str) -> OpOverload:
    """Return the node that stands for an op in a Dynamo graph on a GPU. Its arguments are those of the op's formula."""
    return _nodes[name]


def without_repeats(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the tensors, with a view in place of each repetition of a tensor.

    Dynamo refuses an autograd.Function that gets a tensor twice; in torch 2.11 it loses a gradient instead.
    """
    seen: list[Tensor | None] = []
    for tensor in tensors:
        again = any(tensor is other for other in seen)
        seen.append(tensor if tensor is None or not again else tensor.view_as(tensor))
    return tuple(seen)


def uses_kernels(backend: str, *tensors: Tensor | None, unsupported_reason: str | None = None) -> bool:
    """Return whether a call on these tensors uses the kernels; for "auto" only those of a GPU.

    Args:
        backend: one of BACKENDS.
        tensors: all tensors of the call; the first determines the device.
        unsupported_reason: as for `Op`.

    Raises:
        ValueError: no such backend.
        BackendUnavailableError: "cpp" or "triton" where it cannot run.
        RuntimeError: "cpp" or "triton" inside a transform of `torch.func`, for a tensor subclass, or for a dtype that
            the kernels do not support.
    """
    if backend == "eager":
        return False
    if backend not in BACKENDS:
        raise ValueError(f"{no_such('backend', backend, BACKENDS)}; fuse(op, backend=...) takes the other backends")
    assert tensors[0] is not None
    device = tensors[0].device
    if backend == "auto":
        if not is_on_gpu(tensors[0]) or is_compiling() or INTERPRETED:
            return False
        return why_no_kernels(device) is None and (unsupported_reason or _unsupported_reason(tensors)) is None
    unavailable = why_no_kernels(device) if backend == "triton" else _why_no_cpp(device)
    if unavailable is not None:
        raise BackendUnavailableError(f"backend {backend!r} cannot run here: {unavailable}; or use backend='auto'")
    reason = (unsupported_reason if backend == "triton" else None) or _unsupported_reason(tensors)
    if reason is not None:
        raise RuntimeError(f"backend {backend!r} cannot take this call: {reason}; use backend='auto' or 'eager'")
    return True


def _why_no_cpp(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the kernels in C++ are for a CPU, got {device.type}"
    if INTERPRETED:
        return "TRITON_INTERPRET is set, and Triton's kernels replace those in C++"
    return None if has_kernels() else "the kernels in C++ were not built when this library was installed"


def _records_a_graph(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether Dynamo, or AOTAutograd behind it, traces a call, outside of `torch.func` and of `torch.export`."""
    if torch.compiler.is_dynamo_compiling():
        return is_dynamo_tracing()
    within = is_compiling() and not torch.compiler.is_exporting()
    return within and not (transforms_are_active() or any(map(is_wrapper, tensors)))


def runs_cpp(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether the kernels in C++ run here and take these tensors."""
    first = tensors[0]
    assert first is not None
    return first.is_cpu and not INTERPRETED and _unsupported_reason(tensors) is None and has_kernels()


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda  # a function, so that tests without a GPU can replace it


def _unsupported_reason(tensors: Sequence[Tensor | None]) -> str | None:
    """Return why only the formula takes these tensors, or None."""
    compiling = is_compiling()
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in KERNEL_DTYPES and tensor.is_floating_point():
            return f"its kernels are for float32, bfloat16 and float16, got {tensor.dtype}"
        if not compiling and type(tensor) not in PLAIN_TENSORS:
            return f"a {type(tensor).__name__} may override torch's ops, which kernels do not call"
        if not compiling and tensor.dim() and tensor.shape[-1] > WIDEST:
            return f"its kernels are for at most {WIDEST} columns, got {tensor.shape[-1]}"
    if not compiling and jit_is_tracing():
        return "torch.jit.trace cannot record its gradients"
    return "inside a transform of torch.func" if not compiling and transforms_are_active() else None


def in_cpp(tensor: Tensor) -> bool:
    """Return whether the kernels for a tensor's device are those in C++. Used by functions that launch kernels."""
    return tensor.is_cpu and not INTERPRETED


def needs_grad(*arguments: Any) -> bool:
    """Return whether autograd records a call with these arguments."""
    if torch.is_grad_enabled():
        for argument in arguments:  # any() would take four times as long
            if isinstance(argument, Tensor) and argument.requires_grad:
                return True
    return False


def differentiable(function: type[torch.autograd.Function], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `forward`, or the autograd `function` where autograd records the call."""

    def call(*arguments: Any) -> Any:
        if needs_grad(*arguments):
            return function.apply(*arguments)  # type: ignore[no-untyped-call]
        return forward(*arguments)

    return call


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast gives a matmul's inputs, or None if it is off. Used by linear ops and losses."""
    # Meta has no autocast, and asking for it raises. torch.amp.is_autocast_available cannot be traced in torch 2.11.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which products of tensors on x's device keep their dtypes.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(x):
    ...     (x @ x).dtype
    torch.float32
    """
    # The meta device has no autocast.
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def backward_takes_formula() -> bool:
    """Return whether a backward needs the formula, since neither autograd nor a transform can differentiate a kernel.

    It does under `create_graph` and in a transform of `torch.func`, where backward may run though forward did not.
    """
    return torch.is_grad_enabled() or (not is_compiling() and transforms_are_active())


def gradients_by_formula(
    formula: Callable[..., Tensor], inputs: Sequence[Tensor | None], incoming: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of a formula; differentiable under `create_graph` and inside a transform.

    Args:
        formula: takes `inputs`.
        inputs: the inputs that forward saved.
        incoming: the gradient of the output.
        wanted: which inputs need a gradient.
    """
    if not any(wanted):
        return [None] * len(inputs)

    chosen: Any = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]

    def of_chosen(*leaves: Tensor) -> Tensor:
        leaf = iter(leaves)
        return formula(*(next(leaf) if want else tensor for tensor, want in zip(inputs, wanted, strict=True)))

    # Inside a transform autograd finds no graph. Dynamo breaks the graph at `torch.autograd.grad`, here under compiled
    # autograd: AOTAutograd then returns the leaves and the output of the first part without the path between them.
    if is_compiling() or transforms_are_active():
        pull: Any = torch.func.vjp(of_chosen, *chosen)[1]
        gradients = iter(pull(incoming))
    else:
        with torch.enable_grad():
            # Views, since one input may depend on another: that dependency is not part of the formula.
            leaves = [tensor.view_as(tensor) for tensor in chosen]
            output = of_chosen(*leaves)
        created = torch.is_grad_enabled()
        gradients = iter(torch.autograd.grad(output, leaves, incoming, create_graph=created, allow_unused=True))
    return [next(gradients) if want else None for want in wanted]


def define(
    schema: str,
    launch: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    keys: Sequence[str] = ("CUDA", "CPU"),
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """Register `torch.ops.fuselayers.name`, and return it.

    Args:
        schema: "name(Tensor x, ...) -> Tensor".
        launch: runs the kernels on the device of the tensors: in C++ where `in_cpp`, else in Triton.
        fake: returns empty results.
        keys: the dispatch keys for which `launch` is registered.
        tags: what compilers have to know of it.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tuple(tags))  # type: ignore[no-untyped-call]
    for key in keys:
        _library.impl(name, outside_dynamo(launch), key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fuselayers::{name}", fake, lib=_library)
    # A call goes through torch's dispatcher, which takes 4 to 9 us: a gradient, and what a hook on saved tensors
    # returns, may be a subclass, negated, or batched.
    op: Callable[..., Any] = getattr(torch.ops.fuselayers, name).default
    return op
