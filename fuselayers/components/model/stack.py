"""The part that both models have in common: positions, blocks, and the norm after them."""

from torch import nn

from ..block import Block
from ..checks import check_positive
from ..norm import Norm
from ..position import Position
from ..registry import Choice, accepted, create

__all__ = ["build_blocks", "build_final_norm", "build_position"]


def build_position(position: Choice | str, *, context_length: int, hidden_dim: int) -> Position:
    """Build the chosen kind of position; those that keep a table get its sizes."""
    sizes = accepted("position", position, context_length=context_length, hidden_dim=hidden_dim)
    built: Position = create("position", position, **sizes)
    return built


def build_blocks(
    block: Choice | str,
    hidden_dim: int,
    *,
    num_layers: int,
    attention: Choice | str,
    feedforward: Choice | str,
    norm: Choice | str,
    dropout: float,
    causal: bool,
    backend: str | None,
    partition: str,
    position: Position,
) -> nn.ModuleList:
    """Build `num_layers` equal blocks, whose heads `position` can rotate."""
    check_positive("num_layers", num_layers)
    blocks: list[Block] = [
        create(
            "block",
            block,
            hidden_dim,
            attention=attention,
            feedforward=feedforward,
            norm=norm,
            dropout=dropout,
            causal=causal,
            backend=backend,
            partition=partition,
        )
        for _ in range(num_layers)
    ]
    head_dim = getattr(blocks[0].attention, "head_dim", None)
    if head_dim is not None:
        position.check_head_dim(head_dim)
    return nn.ModuleList(blocks)


def build_final_norm(blocks: nn.ModuleList, norm: Choice | str, hidden_dim: int) -> Norm | None:
    """Build the norm after the last block, or return None where the blocks normalise the stream themselves."""
    if not blocks[-1].final_norm:
        return None
    built: Norm = create("norm", norm, hidden_dim)
    return built
