"""Activation checkpointing: backward recomputes the values that forward does not keep."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...._torch.dispatch import OpOverload
from ....configs.build import blocks_of

_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    }
)


def checkpoint_blocks(model: nn.Module, way: str) -> None:
    """Make backward recompute each block of a model: all of it ("block"), or all but attention and every second
    matrix product ("selective").

    It replaces the forward of each block. The hooks of FSDP stay outside of it, and a later fusion includes it: the
    fusion core obeys the tags of checkpointing.

    Raises:
        ValueError: a reversible block, which keeps nothing already.
    """
    for block in blocks_of(model):
        if getattr(block, "reversible", False):
            raise ValueError(
                f"parallel.checkpointing={way} recomputes blocks, and a reversible block keeps no activations that "
                "could be recomputed; set parallel.checkpointing=none"
            )
        forward = block.forward
        recomputed = partial(checkpoint, forward, use_reentrant=False)
        # Dynamo traces our context_fn, but not torch's default if that is passed.
        block.forward = partial(recomputed, context_fn=_selective) if way == "selective" else recomputed


def _selective() -> Any:
    """The contexts of one call of a block: attention and every second matrix product are kept."""
    counts = {False: 0, True: 0}  # of products, in forward and in its repetition

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Keep all random results: a recompute that skips one draw gives the next draws other numbers. Attention is
        # tagged as random too.
        kept = isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
        if op in _PRODUCTS:
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
