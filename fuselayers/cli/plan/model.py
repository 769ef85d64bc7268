"""Computes the numbers of a config's model that a plan needs. Nothing runs, and no weight takes memory.

FLOPs are those of torch's flop counter, through `model_costs`. A block keeps the values that `explain` names for this
block alone; blocks of the same kind are explained once.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...configs import Config, build, model_costs
from ...configs.build import blocks_of
from ...configs.costs import check_described
from ...partition import MemoryReport, Partitioner, explain, partitioner
from ..train.engine.checkpointing import checkpoint_blocks


@dataclass(frozen=True)
class Activations:
    """The values that all blocks keep from forward to backward, for one example.

    Attributes:
        saved: bytes.
        inside: the part of `saved` whose last dimension is not the model's width. Tensor parallelism divides it.
        largest: the bytes of the block that keeps most.
        repeated_flops: FLOPs of forward that backward repeats.
    """

    saved: float
    inside: float
    largest: float
    repeated_flops: float


@dataclass(frozen=True)
class PlannedModel:
    """A model's numbers.

    Attributes:
        parameters: their number; tied ones count once.
        largest_unit: the most parameters that FSDP gathers at a time: those of a block, or all outside of blocks.
        blocks: their number.
        tokens: of an example; 1 for a model without tokens.
        width: of the stream between blocks.
        vocabulary: classes of a token; 0 for a model without tokens.
        fused_loss: whether the loss has the logits of one chunk in memory, instead of all.
        heads: the number of heads and of key-value heads; None if the attention has none.
        itemsize: bytes of a number in matrix products: 2 in bfloat16, 4 in float32.
        flops: of forward and backward for an example, without recompute. Causal attention counts all scores.
        stream: bytes of the blocks' inputs, for an example.
        run: the activations without checkpointing.
        kept: the activations with the checkpointing of the plan.
    """

    name: str
    parameters: int
    largest_unit: int
    blocks: int
    tokens: int
    width: int
    vocabulary: int
    fused_loss: bool
    heads: tuple[int | None, int | None]
    itemsize: int
    flops: float
    stream: float
    run: Activations
    kept: Activations


def planned_model(config: Config, *, name: str | None = None) -> PlannedModel:
    """Return the numbers of a config's model, with its `train.precision` and its `parallel.checkpointing`.

    Args:
        name: of the model; None takes the config's `model.name`.

    Raises:
        ValueError: the model has no `example_inputs`, its context is shorter than the data's sequences, or its blocks
            are reversible.
        PartitionError: a budget is too small.
    """
    options, attention = config.model.options, config.attention.options
    context, length = options.get("context_length"), config.data.sequence_length
    if length and context:
        if length > context:
            raise ValueError(f"data.sequence_length is {length} tokens, but the model's context is {context}; lower it")
        config = replace(config, model=replace(config.model, options={**options, "context_length": length}))
    dtype = torch.bfloat16 if config.train.precision == "bfloat16" else torch.float32
    with torch.device("meta"):
        model: Any = build(replace(config, fusion=replace(config.fusion, scope="none"))).to(dtype)
    check_described(config, model)
    calls = _calls_of_blocks(model, dtype)
    fused = config.fusion.scope != "none"
    compress = config.fusion.compress if fused else None
    partition = partitioner(config.fusion.partition if fused else "default", compress=compress)
    run, forward_flops = _activations(calls, partition, fused=fused)
    stream = float(sum(args[0].nbytes for args, _ in calls.values()))
    kept, checkpointing = run, config.parallel.checkpointing
    if checkpointing == "block":
        kept = Activations(stream, 0.0, run.largest, forward_flops)
    elif checkpointing == "selective":
        checkpoint_blocks(model, checkpointing)
        kept, _ = _activations(calls, partition, fused=fused)
    elif checkpointing != "none":
        kept, _ = _activations(calls, partitioner(checkpointing, compress=compress), fused=fused)
    costs = model_costs(config)
    of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in calls]
    heads = attention.get("num_heads")
    return PlannedModel(
        name=name or config.model.name,
        parameters=costs.parameters,
        largest_unit=max(*of_blocks, costs.parameters - sum(of_blocks)),
        blocks=len(calls),
        tokens=length or context or 1,
        width=options.get("hidden_dim") or 0,
        vocabulary=options.get("vocab_size") or 0,
        fused_loss=options.get("loss", "plain") != "plain",
        heads=(heads, attention.get("num_kv_heads") or heads),
        itemsize=dtype.itemsize,
        flops=float(costs.forward_flops + costs.backward_flops),
        stream=stream,
        run=run,
        kept=kept,
    )


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _calls_of_blocks(model: Any, dtype: torch.dtype) -> dict[nn.Module, _Call]:
    """Return the arguments of each block for one example; a model without blocks counts as one block."""
    calls: dict[nn.Module, _Call] = {}
    blocks = blocks_of(model) or [model]
    if any(getattr(block, "reversible", False) for block in blocks):
        raise ValueError(
            "a plan counts the values that blocks keep, but reversible blocks keep none; set model.block=transformer"
        )

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[block] = (args, kwargs)

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    inputs = model.example_inputs(1, device="meta")
    model(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs))
    for hook in hooks:
        hook.remove()
    return calls


def _activations(calls: dict[nn.Module, _Call], partition: Partitioner, *, fused: bool) -> tuple[Activations, float]:
    """Return what blocks keep with a partitioner, and the FLOPs of their forward."""
    reports: dict[str, MemoryReport] = {}
    saved, inside, repeated_flops, forward_flops = [], 0, 0.0, 0.0
    for block, (args, kwargs) in calls.items():
        kind = f"{block} {[tensor.shape for tensor in args if isinstance(tensor, Tensor)]}"
        if kind not in reports:
            backend = "inductor" if fused else "eager"
            reports[kind] = explain(block, *args, backend=backend, partition=partition, **kwargs)
        report, width = reports[kind], args[0].shape[-1:]
        saved.append(report.totals["this"].saved_bytes)
        inside += sum(value.num_bytes for value in report.saved if value.shape[-1:] != width)
        repeated_flops += report.totals["this"].recomputed_flops
        forward_flops += report.forward_flops
    return Activations(float(sum(saved)), float(inside), float(max(saved)), repeated_flops), forward_flops
