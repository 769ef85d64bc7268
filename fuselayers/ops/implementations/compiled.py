"""compiled -- an op's formula compiled to C++ by Inductor: the implementation of the ops on a CPU.

Forward and backward are compiled separately and without autograd. So the op decides which tensors it saves, as with its
kernels, and a second derivative goes through the op.

The cache key of a call is its dtypes, shapes and options. The first code is static in all sizes; when a size changes,
the next code is dynamic in that size. The first call takes some seconds, in which Inductor compiles; later processes
find the code on disk.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..._torch.guards import compile_lock, disable_dynamo
from ...errors import BackendUnavailableError, FallbackWarning
from .launch import INTERPRETED

_log = logging.getLogger("fuselayers")

# For one combination of options and dtypes. Beyond this limit the formula runs op by op.
_MAX_CODES: Final = 16
# Values of the float options, such as p and eps: constants of the code. A p that changes at each step is not compiled.
_MAX_NUMBERS: Final = 8
_MAX_CALLS: Final = 4096


def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles `formula` at its first call, and again for new dtypes, shapes and options.

    If Inductor cannot compile the formula, it runs op by op, with one FallbackWarning.

    Args:
        formula: a function of tensors, at least one, and of options: numbers, strings, dtypes, lists of them. It
            mutates no tensor and returns new ones. Autograd does not record it.
    """
    return disable_dynamo("Inductor compiled it")(functools.partial(_Compiled(formula).call))


class _Compiled:
    """A formula and its compiled code."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        self._formula = formula
        self._calls: dict[tuple[Any, ...], Callable[[list[Tensor]], Any]] = {}
        self._codes: dict[tuple[Any, ...], list[_Code]] = {}
        self._numbers: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
        self._warned = False

    def call(self, *arguments: Any) -> Any:
        tensors: list[Tensor] = []
        call: list[Any] = [torch.get_num_threads()]  # a constant in Inductor's code
        for one in arguments:
            if isinstance(one, Tensor):
                # Else each layout would need its own code.
                tensors.append(one if one.is_contiguous() and not one.is_neg() else _contiguous(one))
                call += one.dtype, one.shape
            elif not isinstance(one, list):
                call.append(one)
            elif one and isinstance(one[0], Tensor):
                tensors += map(_contiguous, one)
                call.append(tuple((each.dtype, each.shape) for each in one))
            else:
                call.append(tuple(one))
        key = tuple(call)
        run = self._calls.get(key)
        if run is None:
            run = self._run(arguments, tensors)
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[key] = run
        return run(tensors)

    def _run(self, arguments: tuple[Any, ...], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        formula = _bind_options(self._formula, arguments)
        if not tensors[0].numel():
            return lambda tensors: _without_autocast(formula, tensors)
        ranks = tree_map_only(Tensor, lambda tensor: (tensor.dtype, tensor.dim()), arguments)
        kind = torch.get_num_threads(), *(tuple(one) if isinstance(one, list) else one for one in ranks)
        # Inductor, Dynamo and FX keep state for the whole process.
        with compile_lock():
            codes = self._codes.setdefault(kind, [])
            for code in codes:
                if code.takes(tensors):
                    return code.run
            try:
                if len(codes) == _MAX_CODES:
                    raise BackendUnavailableError(f"it would be code for more than {_MAX_CODES} combinations of sizes")
                numbers = tuple(one for one in kind if isinstance(one, float))
                others = tuple(one for one in kind if not isinstance(one, float))
                known = self._numbers.setdefault(others, set())
                if numbers not in known and len(known) == _MAX_NUMBERS:
                    raise BackendUnavailableError(
                        f"it would be code for more than {_MAX_NUMBERS} values of {numbers}; keep p and eps constant"
                    )
                known.add(numbers)
                _log.info("compiling %s", getattr(self._formula, "__module__", self._formula))
                code = _Code(formula, tensors, self._changed_dimensions(codes, tensors))
            except BackendUnavailableError as error:
                if not self._warned:
                    self._warned = True
                    name = getattr(self._formula, "__qualname__", type(self._formula).__name__)
                    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
                    text = f"{self._formula.__module__}.{name} runs op by op for {shapes}: {error}"
                    warnings.warn(text, FallbackWarning, stacklevel=2)
                return lambda tensors: _without_autocast(formula, tensors)
            codes.append(code)
            return code.run

    def _changed_dimensions(self, codes: Sequence["_Code"], tensors: Sequence[Tensor]) -> list[list[int]]:
        """Return, for each tensor, the dimensions whose size has changed between calls."""
        return [
            [dim for dim, size in enumerate(tensor.shape) if any(code.shapes[number][dim] != size for code in codes)]
            for number, tensor in enumerate(tensors)
        ]


class _Code:
    """Compiled code, static in some sizes and dynamic in others."""

    def __init__(self, formula: Callable[..., Any], tensors: Sequence[Tensor], any_size: list[list[int]]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        is_one = False

        def results(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal is_one
            made = formula(*tensors)
            is_one = isinstance(made, Tensor)
            return (made,) if is_one else tuple(made)

        from ...partition.compile_call import CompiledCall, compile_call
        from ...partition.compilers import why_inductor_is_unavailable

        unavailable = why_inductor_is_unavailable(tensors[0].device.type)
        if unavailable is not None:
            raise BackendUnavailableError(unavailable)
        try:
            made: CompiledCall = compile_call(results, tensors, any_size)
        except Exception as error:
            raise BackendUnavailableError(f"{type(error).__name__}: {error}") from error
        self.takes = made.takes
        self.run = (lambda tensors: made.run(tensors)[0]) if is_one else (lambda tensors: tuple(made.run(tensors)))


def _without_autocast(formula: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    with torch.autocast(tensors[0].device.type, enabled=False):
        return formula(*tensors)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()


def _bind_options(formula: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """Bind the options of a formula: return a function of its tensors."""
    leaves, tree = tree_flatten(arguments)
    options = [None if isinstance(one, Tensor) else one for one in leaves]
    positions = [index for index, one in enumerate(leaves) if isinstance(one, Tensor)]

    def bound(*tensors: Tensor) -> Any:
        filled = list(options)
        for index, tensor in zip(positions, tensors, strict=True):
            filled[index] = tensor
        return formula(*tree_unflatten(filled, tree))

    return bound


@functools.cache
def can_compile() -> bool:
    """Return whether formulas can be compiled for the CPU. Cached, because the search for a compiler is slow."""
    return why_not_compiled(torch.device("cpu")) is None


def why_not_compiled(device: torch.device) -> str | None:
    """Return None if formulas can be compiled for `device`, else what is missing."""
    if device.type != "cpu":
        return (
            f"the ops' compiled implementation is for a CPU, got {device.type}; "
            "fuse(op, backend='inductor') compiles there"
        )
    from ...partition.compilers import why_inductor_is_unavailable

    if INTERPRETED:
        return "TRITON_INTERPRET is set, and the kernels replace it"
    return why_inductor_is_unavailable("cpu")
