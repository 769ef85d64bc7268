"""layout -- how a training is spread over GPUs, and whether a model allows it."""

import re
from dataclasses import dataclass, replace

from ...configs import ParallelConfig
from ...names import shown


@dataclass(frozen=True)
class Layout:
    """The options of the section `parallel` that a plan uses.

    Attributes:
        dp: data-parallel groups; 0 for all GPUs that `tp` leaves.
        tp: GPUs of a tensor-parallel group.
        sequence: whether the values outside of attention and feedforward are spread over a tensor-parallel group too.
        shard: "fsdp" spreads weights, gradients and optimizer over the data-parallel groups; "ddp" has all of them on
            each GPU; "none" is one group.
        checkpointing: what a layer saves: "none" what the run's partitioner or eager mode saves, "selective" its input
            and the results of attention and of its first, third, ... matrix product, "block" its input, "budget:0.5"
            that share of what eager mode saves.
    """

    dp: int = 0
    tp: int = 1
    sequence: bool = False
    shard: str = "none"
    checkpointing: str = "none"

    @property
    def recomputes_blocks(self) -> bool:
        """Whether a layer saves its input only."""
        return self.checkpointing == "block"

    def __str__(self) -> str:
        tensor = f", tp {self.tp}{' + sequence' if self.sequence else ''}" if self.tp > 1 else ""
        checkpointing = "" if self.checkpointing == "none" else f", checkpointing {self.checkpointing}"
        return f"dp {self.dp} {self.shard}{tensor}{checkpointing}"


def layout_of(parallel: ParallelConfig) -> Layout:
    """Return the layout that a config's section `parallel` asks for.

    Raises:
        ValueError: its budget is no share.

    >>> from fuselayers.configs import compose
    >>> layout_of(compose("gpt_nano", ["parallel=fsdp", "parallel.tp=2"]).parallel)
    Layout(dp=0, tp=2, sequence=False, shard='fsdp', checkpointing='none')
    """
    if parallel.budget is not None and not is_budget(parallel.budget):
        raise ValueError(
            f"a plan takes a budget as a share of what eager mode saves, as budget:0.5, got {shown(parallel.budget)}"
        )
    return Layout(parallel.dp, parallel.tp, parallel.sequence, parallel.shard, parallel.checkpointing)


def is_budget(text: str) -> bool:
    """Whether a text is a budget as a share: budget:0.5.

    >>> is_budget("budget:0.5"), is_budget("budget:1.5"), is_budget("budget:x")
    (True, False, False)
    """
    match = re.fullmatch(r"budget:([0-9]*\.?[0-9]+)", text)
    return match is not None and 0 < float(match[1]) <= 1


def fitted(layout: Layout, *, gpus: int, heads: int | None, kv_heads: int | None) -> Layout:
    """Return the layout with its data-parallel groups counted.

    Args:
        layout: as asked for.
        gpus: all of them.
        heads: of the model's attention; None without.
        kv_heads: its key-value heads.

    Raises:
        ValueError: the model or the number of GPUs does not allow it; the text has the numbers.

    >>> fitted(Layout(tp=2, shard="fsdp"), gpus=8, heads=4, kv_heads=2).dp
    4
    """
    tp = layout.tp
    if gpus % tp:
        raise ValueError(f"parallel.tp={tp} does not divide gpus={gpus}; choose one of {_divisors(gpus)}")
    for count, kind in ((heads, "heads"), (kv_heads, "key-value heads")):
        if tp > 1 and (count is None or count % tp):
            found = "none" if count is None else str(count)
            raise ValueError(
                f"parallel.tp={tp} must divide the {kind} of the attention, which has {found}"
                + (f"; choose one of {_divisors(count)}" if count else "; leave parallel.tp out")
            )
    dp = layout.dp or gpus // tp
    if dp * tp != gpus:
        raise ValueError(
            f"parallel.dp={dp} x parallel.tp={tp} is {dp * tp} GPUs, and gpus={gpus}; leave parallel.dp out, or set it "
            f"to {gpus // tp}"
        )
    if layout.shard == "none" and dp > 1:
        raise ValueError(f"parallel.shard=none is for one data-parallel group, and there are {dp}; set ddp or fsdp")
    if layout.shard == "ddp" and dp > 1 and tp > 1:
        raise ValueError(
            f"parallel.shard=ddp cannot hold weights that parallel.tp={tp} divides; set parallel.shard=fsdp"
        )
    return replace(layout, dp=dp)


def _divisors(count: int) -> str:
    return ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)
