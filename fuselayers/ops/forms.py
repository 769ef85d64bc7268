"""forms -- which form of an op a call takes: its formula, or its own kernels. Used by every op that has kernels.

The formula is plain torch. `torch.compile` and `fuse` see through it and fuse it with what stands around it; so do
`torch.func`'s transforms and tensor subclasses. In eager mode on a GPU each op of a formula would be a trip to memory,
so there the op's own kernels run, as one call.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..names import no_such
from ..partition import BackendUnavailableError
from ..partition.torch_private import transforms_are_active
from .launch import INTERPRETED, why_no_kernels

__all__ = ["BACKENDS", "define", "needs_grad", "second_order", "takes_kernels"]

BACKENDS: Final = ("auto", "eager", "triton")
_KERNEL_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})

_library = torch.library.Library("fuselayers", "FRAGMENT")  # type: ignore[no-untyped-call]


def takes_kernels(backend: str, *tensors: Tensor | None) -> bool:
    """Return whether a call on these tensors goes to the op's kernels.

    Args:
        backend: "auto" takes them on a GPU in eager mode; "eager" never does; "triton" always does, inside a compiled
            function too.
        tensors: all of the call's floating tensors, the first of which says the device.

    Raises:
        ValueError: no such backend; or "triton" for a dtype that the kernels do not know.
        BackendUnavailableError: "triton" where it cannot run.
        RuntimeError: "triton" inside a transform of `torch.func`, or for a tensor subclass.
    """
    if backend == "eager":
        return False
    if backend not in BACKENDS:
        raise ValueError(no_such("backend", backend, BACKENDS))
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    if backend == "auto":
        if device.type != "cuda" or torch.compiler.is_compiling() or INTERPRETED:
            return False
        return why_no_kernels(device) is None and _why_not(given) is None
    reason = why_no_kernels(device)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot run here: {reason}; or leave it to backend='auto'")
    reason = _why_not(given)
    if reason is not None:
        raise RuntimeError(f"backend 'triton' cannot take this call: {reason}; use backend='auto' or 'eager'")
    return True


def _why_not(tensors: Sequence[Tensor]) -> str | None:
    for tensor in tensors:
        if tensor.dtype not in _KERNEL_DTYPES:
            return f"its kernels are for float32, bfloat16 and float16, got {tensor.dtype}"
        if not torch.compiler.is_compiling() and type(tensor) not in (Tensor, nn.Parameter):
            return f"a {type(tensor).__name__} has rules of its own"
    if not torch.compiler.is_compiling() and transforms_are_active():
        return "inside a transform of torch.func"
    return None


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd will ask for a backward of a call on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def second_order(
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    incoming: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of a formula in a way that can be differentiated again.

    It is for a backward that runs under `create_graph=True`: what a kernel computes, autograd does not see.

    Args:
        formula: takes `inputs`.
        inputs: as forward saved them.
        incoming: the gradients of its outputs.
        wanted: for which of the inputs.
    """
    # Through views: one input may itself be computed from another, and that way is not the formula's.
    inputs = [one if one is None else one.view_as(one) for one in inputs]
    outputs = formula(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(out, given) for out, given in zip(outputs, incoming, strict=True) if given is not None]
    places = [place for place, want in enumerate(wanted) if want]
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        [one for place in places if (one := inputs[place]) is not None],
        [given for _, given in pairs],
        create_graph=True,
        allow_unused=True,
    )
    gradients: list[Tensor | None] = [None] * len(inputs)
    for place, gradient in zip(places, found, strict=True):
        gradients[place] = gradient
    return gradients


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Give torch an op that runs kernels, and return it.

    Args:
        schema: "name(Tensor x, ...) -> Tensor"; the op is `torch.ops.fuselayers.name`.
        run: launches the kernels, on the device of its tensors.
        fake: makes the results without computing them.
    """
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for key in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
        _library.impl(name, run, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fuselayers::{name}", fake, lib=_library)
    return getattr(torch.ops.fuselayers, name).default
