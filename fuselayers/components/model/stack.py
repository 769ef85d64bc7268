"""The stack that all models use: positions, blocks, and the norm after them.

x        [B, T, D]   B batch, T tokens, D model
memory   [B, S, D]   the input of cross-attention, S tokens
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..attention import KeyValueCache
from ..attention.inputs import check_able
from ..block.reversible import run_reversible
from ..norm import Norm
from ..option import Probability, Size, accepted, checked, create
from ..position import Position
from ..registry import Choice, as_choice, check_base, title
from .layers import LayerChange, changed_parts
from .model import Model


class Stack(Model):
    """Positions, blocks in a row, and a norm at the end if the residual style needs one.

    The arguments and errors of `Model`; its subclasses also apply dropout to the embeddings.

    Args:
        cross_attention: the attention to the memory, or None for blocks without one.
        causal: whether a token looks only at itself and the tokens before it.
    """

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_layers: Size,
        context_length: Size,
        attention: Choice | str,
        feedforward: Choice | str = "mlp",
        norm: Choice | str = "layer_norm",
        residual: Choice | str = "pre",
        position: Choice | str = "learned",
        block: Choice | str = "transformer",
        layers: Sequence[LayerChange] = (),
        cross_attention: Choice | str | None = None,
        dropout: Probability = 0.0,
        causal: bool,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.context_length = context_length
        self.dropout = dropout
        parts = {"attention": attention, "feedforward": feedforward, "norm": norm, "residual": residual, "block": block}
        of_layers = changed_parts(parts, layers, num_layers=num_layers)
        built_in: dict[str, Any] = {
            "cross_attention": cross_attention,
            "dropout": dropout,
            "causal": causal,
            "num_layers": num_layers,
            "context_length": context_length,
            "backend": backend,
            "partition": partition,
        }
        self.blocks = nn.ModuleList(
            create("block", chosen.pop("block"), hidden_dim, **chosen, **built_in, layer=layer)
            for layer, chosen in enumerate(dict(of_layer) for of_layer in of_layers)
        )
        num_heads = getattr(self.blocks[0].attention, "num_heads", None)
        sizes = {"context_length": context_length, "hidden_dim": hidden_dim, "num_heads": num_heads, "causal": causal}
        check_base("position", position, Position)
        self.position: Position = create("position", position, **accepted("position", position, **sizes))
        wanted_by = f"position {as_choice(position).name!r}"
        for layer, (built, of_layer) in enumerate(zip(self.blocks, of_layers, strict=True)):
            for ability in sorted(self.position.needs):
                check_able(of_layer["attention"], ability, wanted_by=wanted_by)
            head_dim = getattr(built.attention, "head_dim", None)
            if head_dim is not None:
                self.position.check_head_dim(head_dim)
            heads = getattr(built.attention, "num_heads", None)
            if "distance_bias" in self.position.needs and heads != num_heads:
                raise ValueError(
                    f"all layers share the bias of {wanted_by}, so they need the same number of heads: layer 0 has "
                    f"{num_heads}, layer {layer} has {heads}"
                )
        self.norm: Norm | None = create("norm", norm, hidden_dim) if self.blocks[-1].final_norm else None

    def run_blocks(self, x_BTD: Tensor, *, caches: Sequence[KeyValueCache] | None = None, **inputs: Any) -> Tensor:
        """Return the stream after all blocks and the norm: [B, T, D] -> [B, T, D].

        Args:
            x_BTD: the embeddings, positions included.
            caches: one `KeyValueCache` per block during generation, else None.
            inputs: of every block: key_padding_mask, mask, documents, memory, memory_padding_mask.

        Raises:
            RuntimeError: a reversible block has a hook; the block itself is never called.
        """
        # Inputs that are None are left out, since a user's block need not take them.
        inputs = {name: value for name, value in inputs.items() if value is not None}
        first = caches[0].length if caches else 0
        if "rotate" in self.position.needs:
            rotate = self.position.rotate
            inputs["rotate"] = functools.partial(rotate, first=first) if first else rotate
        if "distance_bias" in self.position.needs:
            inputs["distance_bias"] = self.position.distance_bias(x_BTD, first=first)
        x_BTD, shard = self.layout.split_tokens(x_BTD)
        if shard is not None:
            inputs["shard"] = shard
        run: list[tuple[nn.Module, dict[str, Any]]] = []
        for number, block in enumerate(self.blocks):
            of_block = inputs | {"cache": caches[number]} if caches else inputs
            if getattr(block, "reversible", False):
                run.append((block, of_block))
                continue
            x_BTD, run = run_reversible(run, x_BTD), []
            x_BTD = block(x_BTD, **of_block)
        x_BTD = run_reversible(run, x_BTD)
        return self.layout.join_tokens(x_BTD if self.norm is None else self.norm(x_BTD), shard)

    def check_documents(self, tokens_BT: Tensor, mask: Tensor | BlockMask | None, document_ids: Tensor | None) -> None:
        """Raise ValueError for ids of another shape, with a `BlockMask`, or with a feedforward that mixes tokens."""
        if document_ids is None:
            return
        if document_ids.shape != tokens_BT.shape:
            raise ValueError(
                f"document_ids must be {list(tokens_BT.shape)} like tokens, got {list(document_ids.shape)}"
            )
        if isinstance(mask, BlockMask):
            raise ValueError("document_ids cannot be added to a BlockMask; put the documents into the BlockMask")
        for block in self.blocks:
            if getattr(type(block.feedforward), "mixes_tokens", False):
                raise ValueError(
                    f"{title(block.feedforward)} mixes tokens of different documents; use another feedforward"
                )

    def new_caches(self, capacity: int) -> list[KeyValueCache] | None:
        """Return an empty cache for each block, or None if a block takes no cache or needs earlier tokens."""
        for block in self.blocks:
            mixes_tokens = any(getattr(part, "mixes_tokens", False) for part in block.modules())
            if mixes_tokens or "cache" not in getattr(block, "takes", ()):
                return None
        return [KeyValueCache(capacity) for _ in self.blocks]

    def example_inputs(self, batch_size: int = 1, device: torch.device | str | None = "meta") -> tuple[Tensor, Tensor]:
        """Return inputs of `forward` in training: tokens and targets of a full context, [B, T] each, all 0."""
        tokens_BT = torch.zeros(batch_size, self.context_length, dtype=torch.int64, device=device)
        return tokens_BT, tokens_BT.clone()

    def extra_repr(self) -> str:
        return f"context_length={self.context_length}, dropout={self.dropout}"
