"""Calls of attention: every rule, and sizes that meet the edges of blocks, vectors and heads."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops import Shard
from fuselayers.ops.attention import attention_reference
from tests.ops.contract import DEVICE, seed_of, tensors


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        q: [B, H, T, C].
        k: [G, S], the key-value heads and the keys; None for those of q.
        width: the channels of a value; None for C.
        bias, sinks: the shape of the bias, and whether there are sinks.
        distances: whether there is a bias of distances.
        options: keyword arguments, or functions that make them.
    """

    q: tuple[int, int, int, int]
    k: tuple[int, int] | None = None
    width: int | None = None
    bias: tuple[int, ...] | None = None
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    distances: bool = False

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return q, k, v, and a bias and the sinks if the case has them."""
        batch, heads, tokens, channels = self.q
        groups, keys = self.k or (heads, tokens)
        shapes = [self.q, (batch, groups, keys, channels), (batch, groups, keys, self.width or channels)]
        shapes += [self.bias] if self.bias else []
        shapes += [(heads, max(tokens + keys - 1, 0))] if self.distances else []
        q, *others = tensors(*shapes, *([(heads,)] if self.sinks else []), dtype=dtype)
        return [q / 4, *others]  # scores of a usual size

    def forms(self, backend: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Return the op and the reference, as functions of `inputs`."""
        options = {name: value() if callable(value) else value for name, value in self.options.items()}
        names = ["q", "k", "v"] + ["bias"] * (self.bias is not None)
        names += ["distance_bias"] * self.distances + ["sinks"] * self.sinks

        def by_name(fn: Callable[..., Tensor], *inputs: Tensor, **others: Any) -> Tensor:
            return fn(**dict(zip(names, inputs, strict=True)), **options, **others)

        return partial(by_name, ops.attention, backend=backend), partial(by_name, attention_reference)


def bits(*shape: int, share: float = 0.7) -> Callable[[], Tensor]:
    """Return a function that makes a random mask, True at a share of its elements."""
    return lambda: (torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share).to(DEVICE)


def packed_documents(batch: int, keys: int) -> Callable[[], Tensor]:
    """Return a function that numbers documents of 1 to 90 tokens; the numbers are not in order."""

    def made() -> Tensor:
        lengths = torch.randint(1, 90, (batch, keys), generator=torch.Generator().manual_seed(4))
        place = torch.arange(keys)
        return ((lengths.cumsum(1)[:, None] <= place[:, None]).sum(-1) * 7 % 5).to(DEVICE)

    return made


DROPPING = {"p": 0.3, "seed": seed_of()}

CASES: dict[str, Case] = {
    "full": Case((2, 3, 33, 16)),
    "causal": Case((2, 3, 150, 32), options={"causal": True}),
    "causal, several blocks": Case((1, 2, 300, 16), options={"causal": True}),
    "one token": Case((2, 2, 1, 16), (2, 9)),
    "one key": Case((2, 2, 5, 16), (2, 1)),
    "the last token of a cache": Case((2, 4, 1, 16), (2, 140), options={"causal": True, "first": 139}),
    "more tokens of a cache": Case((2, 4, 7, 16), (2, 140), options={"causal": True, "first": 133}),
    "queries without keys": Case((1, 2, 131, 16), (2, 77), options={"causal": True, "window": 40}),
    "sums over many queries": Case((1, 2, 4096, 16), (2, 33), bias=(33,)),
    "sums over many keys": Case((1, 2, 33, 16), (2, 4096)),
    "fewer queries": Case((1, 4, 77, 64), (1, 131)),
    "shared keys": Case((2, 6, 40, 16), (2, 40), options={"causal": True}),
    "three channels": Case((2, 2, 20, 3)),
    "odd channels": Case((2, 2, 37, 20), options={"causal": True}),
    "wide heads": Case((1, 1, 40, 136)),
    "narrow values": Case((2, 2, 40, 16), width=5),
    "wide values": Case((2, 2, 40, 16), (1, 50), width=40),
    "scale": Case((2, 2, 20, 16), options={"scale": 0.1}),
    "window": Case((1, 2, 300, 16), options={"window": 50}),
    "causal window": Case((1, 2, 300, 16), options={"window": 50, "causal": True}),
    "window of all": Case((1, 2, 140, 16), options={"window": sys.maxsize}),
    "window before the last token": Case((2, 2, 3, 16), (2, 9), options={"window": 12, "first": 15}),
    "window of one": Case((1, 2, 40, 16), options={"window": 1, "causal": True}),
    "soft cap": Case((2, 2, 40, 16), options={"soft_cap": 2.0}),
    "soft cap and bias": Case((1, 2, 20, 16), bias=(2, 20, 20), options={"soft_cap": 20.0, "causal": True}),
    "sinks": Case((2, 4, 150, 16), (2, 150), sinks=True, options={"causal": True}),
    "sinks and queries without keys": Case((1, 2, 70, 16), (2, 20), sinks=True, options={"causal": True, "window": 9}),
    "sinks and a scale of zero": Case((1, 2, 20, 16), sinks=True, options={"scale": 0.0}),
    "bias": Case((2, 4, 37, 16), (2, 150), bias=(4, 37, 150)),
    "bias of each sequence": Case((2, 2, 37, 16), bias=(2, 2, 37, 37), options={"causal": True}),
    "one bias of all heads": Case((2, 4, 37, 16), (2, 45), bias=(2, 1, 37, 45)),
    "a bias of keys": Case((2, 2, 37, 16), bias=(2, 2, 1, 37)),
    "one row of bias": Case((2, 2, 37, 16), bias=(37,)),
    "a bias of queries": Case((2, 2, 37, 16), bias=(37, 1), sinks=True),
    "distances": Case((2, 4, 37, 16), (2, 150), distances=True),
    "distances of a long row": Case((2, 2, 20, 16), (1, 1100), distances=True),
    "distances, several blocks": Case((1, 2, 300, 16), options={"causal": True}, distances=True),
    "distances of the last token": Case(
        (2, 4, 1, 16), (2, 140), options={"causal": True, "first": 139}, distances=True
    ),
    "distances of one key": Case((2, 2, 40, 16), (2, 1), distances=True),
    "distances within documents": Case(
        (2, 4, 50, 16), (2, 300), sinks=True, distances=True,
        options={"documents": packed_documents(2, 300), "first": 250, "soft_cap": 5.0},
    ),
    "distances and dropout": Case(
        (2, 2, 40, 16), (1, 45), distances=True,
        options={**DROPPING, "shard": Shard((1, 2, 3, 8), (5, 6, 50, 60)), "key_padding_mask": bits(2, 45)},
    ),
    "distances over many queries": Case((1, 2, 4096, 16), (2, 33), distances=True),
    "distances of one head": Case((2, 1, 20, 16), options={"window": 7}, distances=True),
    "padding": Case((3, 2, 37, 16), (2, 300), options={"key_padding_mask": bits(3, 300)}),
    "mask": Case((2, 2, 150, 16), options={"mask": bits(150, 150)}),
    "mask of heads": Case((2, 2, 40, 16), options={"mask": bits(2, 2, 40, 40, share=0.3), "causal": True}),
    "mask of queries": Case((2, 2, 40, 16), options={"mask": bits(2, 1, 40, 1, share=0.3)}),
    "documents": Case((2, 2, 300, 16), options={"documents": packed_documents(2, 300), "causal": True}),
    "documents of a cache": Case(
        (2, 2, 50, 16), (2, 300), options={"documents": packed_documents(2, 300), "first": 250}
    ),
    "dropout": Case((2, 3, 150, 32), options={**DROPPING, "causal": True}),
    "dropout of odd keys": Case((2, 4, 37, 16), (2, 141), options=DROPPING),
    "dropout of all": Case((2, 2, 20, 16), options={"p": 1.0, "seed": seed_of()}),
    "dropout of a shard": Case(
        (2, 2, 40, 16), (2, 45), options={**DROPPING, "shard": Shard((1, 2, 3, 8), (5, 6, 50, 60)), "causal": True}
    ),
    "all rules": Case(
        (2, 4, 150, 24), (2, 200), 32, (4, 150, 200), True,
        {"causal": True, "window": 99, "first": 20, "soft_cap": 5.0, "scale": 0.2, "key_padding_mask": bits(2, 200),
         "mask": bits(2, 1, 150, 200), "documents": packed_documents(2, 200), **DROPPING},
    ),
    "empty batch": Case((0, 2, 5, 16), bias=(2, 5, 5)),
    "no queries": Case((2, 2, 0, 16), (2, 7)),
    "no keys": Case((2, 2, 5, 16), (2, 0)),
    "distances of no queries": Case((2, 2, 0, 16), (2, 7), distances=True),
    "distances of no keys": Case((2, 2, 5, 16), (2, 0), distances=True),
}  # fmt: skip
