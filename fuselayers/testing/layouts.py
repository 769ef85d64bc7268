"""Seven memory layouts, and a check that a function supports them."""

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


def check_layouts(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """The op supports every layout of its inputs with every layout of its incoming gradients.

    Consecutive inputs have consecutive layouts, so that their strides differ; so do incoming gradients. The 0-sized
    layout applies to tensors with as many dimensions and rows as the first, if the reference accepts it.

    Raises:
        AssertionError: results differ; the text names the layouts.
    """
    truths: dict[tuple[Any, ...], Any] = {}
    for first in range(len(_FULL)):
        names = _in_turn(first, inputs)
        laid_out = [
            LAYOUTS[name](tensor) if tensor.is_floating_point() else tensor
            for name, tensor in zip(names, inputs, strict=True)
        ]
        for at, (got, gradient_names) in enumerate(_every_gradient(op, laid_out, options)):
            # Layouts that do not change the values share the reference's results.
            key = *(name == "expanded" for name in names), -1, *(name == "expanded" for name in gradient_names)
            if key not in truths:
                truths[key] = _truth(reference, laid_out, gradient_names, options)
            plain, exact = truths[key]
            compare(got, plain, exact, inputs, where=f"{names[0]} input, {_FULL[at]} gradient: ")
    _check_zero_sized(op, reference, inputs, options)


def _in_turn(first: int, tensors: Sequence[Tensor]) -> list[str]:
    return [_FULL[(first + place) % len(_FULL)] for place in range(len(tensors))]


def _every_gradient(
    op: Op, inputs: Sequence[Tensor], options: dict[str, Any]
) -> list[tuple[dict[str, Tensor], list[str]]]:
    leaves, outputs = forward(op, inputs, **options)
    results = []
    for first in range(len(_FULL)):
        names = _in_turn(first, outputs)
        incoming = [LAYOUTS[name](gradient) for name, gradient in zip(names, incoming_for(outputs), strict=True)]
        results.append((backward(leaves, outputs, incoming, again=True), names))
    return results


def _truth(
    reference: Op, inputs: Sequence[Tensor], gradient_names: Sequence[str], options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the reference's results on contiguous copies of the values, in the inputs' dtypes and in float64."""

    def results(values: Sequence[Tensor]) -> dict[str, Tensor]:
        leaves, outputs = forward(reference, [value.contiguous() for value in values], **options)
        incoming = [
            LAYOUTS[name](gradient) for name, gradient in zip(gradient_names, incoming_for(outputs), strict=True)
        ]
        return backward(leaves, outputs, [gradient.contiguous() for gradient in incoming])

    return results(inputs), results(cast(inputs, torch.float64))


def _check_zero_sized(op: Op, reference: Op, inputs: Sequence[Tensor], options: dict[str, Any]) -> None:
    dims, rows = inputs[0].dim(), inputs[0].shape[:1]
    if dims < 2:
        return
    empty = [
        LAYOUTS["0-sized"](value) if value.dim() == dims and value.shape[:1] == rows else value for value in inputs
    ]
    try:
        outputs = forward(reference, empty, **options)[1]
    except Exception:
        return
    plain, exact = _truth(reference, empty, ["contiguous"] * len(outputs), options)
    for at, (got, _) in enumerate(_every_gradient(op, empty, options)):
        compare(got, plain, exact, inputs, where=f"0-sized input, {_FULL[at]} gradient: ")
