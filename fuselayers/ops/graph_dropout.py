"""graph_dropout -- the seeded dropout that the fusion core substitutes for torch's own.

A joint graph gets the mask as one op of a seed and a size; a graph of Dynamo's gets the formula of `dropout`. Both use
`keep_mask` of `philox`, as every op of this library does.
"""

import torch
from torch import Tensor

from ..partition.passes import SeededMask, provide_seeded_mask
from .draw import draw_seed
from .dropout import dropout_reference
from .philox import keep_mask, keep_scale

__all__: list[str] = []

_library = torch.library.Library("fuselayers", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("keep_mask(Tensor seed, SymInt[] size, float p) -> Tensor")  # type: ignore[no-untyped-call]


def _keep_mask(seed: Tensor, size: list[int], p: float) -> Tensor:
    return keep_mask(seed, size, p=p).contiguous()


def _dropout(x: Tensor, p: float) -> Tensor:
    return dropout_reference(x, p, seed=draw_seed(device=x.device))


_library.impl("keep_mask", _keep_mask, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "fuselayers::keep_mask", lambda seed, size, p: seed.new_empty(size, dtype=torch.bool), lib=_library
)
provide_seeded_mask(
    SeededMask(
        draw=torch.ops.fuselayers.draw_seed.default,
        mask=torch.ops.fuselayers.keep_mask.default,
        scale=keep_scale,
        pure=frozenset({torch.ops.fuselayers.keep_mask.default, torch.ops.fuselayers.keep_factors.default}),
        dropout=_dropout,
    )
)
