"""Seven memory layouts, and a check that a function supports them."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .comparison import Op, backward, cast, compare, forward, incoming_for

LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "sliced rows": lambda x: torch.stack([x, _nan(x)], dim=-2)[..., 0, :] if x.dim() > 1 else x,
    "sliced columns": lambda x: torch.stack([_nan(x), x], dim=-1)[..., 1],
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() else x,
    "chunked": lambda x: torch.cat([_nan(x), x], dim=-1).chunk(2, dim=-1)[1] if x.dim() else x,
    "0-sized": lambda x: x[:0] if x.dim() > 1 else x,
}
"""Each function takes a tensor [..., N] and returns it in another layout, with NaN in unused memory. Two change values:
"expanded" repeats the first row, or the first element, and "0-sized" has no rows."""


def _nan(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


_FULL: Final = tuple(name for name in LAYOUTS if name != "0-sized")
_CHANGED: Final = ("expanded", "0-sized")


def check_layouts(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """The op supports every layout of its inputs with every layout of its incoming gradients.

    Consecutive inputs have consecutive layouts, so that their strides differ; so do incoming gradients. The 0-sized
    layout applies to tensors with as many dimensions and rows as the first, if the reference accepts it.

    Raises:
        AssertionError: results differ; the text names the layouts.
    """
    layouts = {name: _in_turn(first, inputs) for first, name in enumerate(_FULL)}
    dims, rows = inputs[0].dim(), inputs[0].shape[:1]
    if dims > 1:
        alike = (value.dim() == dims and value.shape[:1] == rows for value in inputs)
        empty = ["0-sized" if is_alike else "contiguous" for is_alike in alike]
        with contextlib.suppress(Exception):
            forward(reference, _laid_out(empty, inputs), **options)
            layouts["0-sized"] = empty
    truths: dict[tuple[str, ...], Any] = {}
    for first, names in layouts.items():
        laid_out = _laid_out(names, inputs)
        leaves, outputs = forward(op, laid_out, **options)
        for index, first_gradient in enumerate(_FULL):
            gradient_names = _in_turn(index, outputs)
            got = backward(leaves, outputs, _laid_out(gradient_names, incoming_for(outputs)), retain_graph=True)
            # Layouts that do not change the values share the reference's results.
            key = tuple(name if name in _CHANGED else "" for name in (*names, "", *gradient_names))
            if key not in truths:
                truths[key] = _truth(reference, laid_out, gradient_names, options)
            plain, exact = truths[key]
            compare(got, plain, exact, inputs, where=f"{first} input, {first_gradient} gradient: ")


def _in_turn(first: int, tensors: Sequence[Tensor]) -> list[str]:
    return [_FULL[(first + index) % len(_FULL)] for index in range(len(tensors))]


def _laid_out(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        LAYOUTS[name](tensor) if tensor.is_floating_point() or name == "0-sized" else tensor
        for name, tensor in zip(names, tensors, strict=True)
    ]


def _truth(
    reference: Op, inputs: Sequence[Tensor], gradient_names: Sequence[str], options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the reference's results on contiguous copies of the values, in the inputs' dtypes and in float64."""

    def results(values: Sequence[Tensor]) -> dict[str, Tensor]:
        leaves, outputs = forward(reference, [value.contiguous() for value in values], **options)
        incoming = _laid_out(gradient_names, incoming_for(outputs))
        return backward(leaves, outputs, [gradient.contiguous() for gradient in incoming])

    return results(inputs), results(cast(inputs, torch.float64))
