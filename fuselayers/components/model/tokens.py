"""Checks, embeddings, logits and losses of tokens.

tokens, targets   [B, T]      B batch, T tokens
logits            [B, T, V]   V vocabulary
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import Choice, as_choice, create

# The target of a position that does not count in the loss, as in torch.
IGNORED = -100


def check_tokens(tokens: Tensor, name: str = "tokens") -> None:
    """Raise unless `tokens` is an int64 or int32 tensor [B, T] with T at least one."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a tensor [B, T], got {type(tokens).__name__}; use torch.tensor({name})")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {tokens.dtype}; convert with {name}.long()")
    if tokens.dim() != 2:
        hint = f"; add the batch dimension with {name}[None]" if tokens.dim() == 1 else ""
        raise ValueError(f"{name} must be [B, T], got {list(tokens.shape)}{hint}")
    if tokens.shape[1] == 0:
        raise ValueError(f"{name} must hold at least one token per row, got {list(tokens.shape)}")


def check_like_tokens(
    name: str, other: Tensor | None, tokens: Tensor, *, dtype: torch.dtype, like: str = "tokens"
) -> None:
    """Raise unless `other` is None or has the shape of `tokens`, called `like`, and the given dtype."""
    if other is None:
        return
    if not isinstance(other, Tensor):
        raise TypeError(f"{name} must be a tensor like {like}, got {type(other).__name__}; use torch.tensor({name})")
    if other.shape != tokens.shape or other.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} {list(tokens.shape)} like {like}, got {other.dtype} {list(other.shape)}"
        )


def example_tokens(batch_size: int, context_length: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Return two tensors of tokens of a full context, all of them 0. Used by the `example_inputs` of the models."""
    tokens_BT = torch.zeros(batch_size, context_length, dtype=torch.int64, device=device)
    return tokens_BT, tokens_BT.clone()


def build_token_embedding(embedding: Choice | str, *, vocab_size: int, hidden_dim: int) -> nn.Embedding:
    """Return the chosen embedding of tokens, an `nn.Embedding`, so that a tied head can use its table.

    Raises:
        ValueError: an unknown name or option, or an embedding of something other than tokens.
        TypeError: the class is no subclass of `nn.Embedding`.
    """
    built = create("embedding", embedding, vocab_size=vocab_size, hidden_dim=hidden_dim)
    if not isinstance(built, nn.Embedding):
        raise TypeError(
            f"embedding {as_choice(embedding).name!r} must be a subclass of nn.Embedding, a table of tokens"
        )
    return built


def look_up(embedding: nn.Embedding, tokens: Tensor, name: str = "tokens") -> Tensor:
    """Return the embedding of each token: [B, T] -> [B, T, D].

    Raises:
        ValueError: a token is outside the table. In a fused model and on a GPU the check is torch's own.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, embedding(tokens))
    try:
        return cast(Tensor, embedding(tokens))
    except IndexError as error:
        raise ValueError(
            f"{name} must be in 0..{embedding.num_embeddings - 1}, got {int(tokens.min())}..{int(tokens.max())}"
        ) from error


def to_logits(x: Tensor, head: nn.Module | Tensor, *, bias_V: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return head(scale * x) + bias: [..., D] -> [..., V].

    Args:
        x: [..., D].
        head: the output layer, or for a tied head the table [V, D] of the embeddings.
        bias_V: added to the logits; None adds nothing.
        scale: factor of x.

    >>> to_logits(torch.ones(2), torch.eye(2), scale=0.5)
    tensor([0.5000, 0.5000])
    """
    # Scaling D numbers is cheaper than V.
    x = x if scale == 1 else x * scale
    if isinstance(head, Tensor):
        return F.linear(x, head, bias_V)
    # The layer is called, so that adapters, hooks, quantization and FSDP work.
    logits: Tensor = head(x)
    # Autocast rounds the result of a layer, but not that of a sum.
    return logits if bias_V is None else logits + bias_V.to(logits.dtype)


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross entropy in nats, a float32 scalar; positions with target -100 do not count.

    It is nan when no position counts, as in torch.
    """
    logits_NV, targets_N = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    if torch.compiler.is_compiling():
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED)
    try:
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED)
    except IndexError as error:
        raise ValueError(
            f"targets must be in 0..{logits_NV.shape[1] - 1} or {IGNORED}, "
            f"got {int(targets_BT.min())}..{int(targets_BT.max())}"
        ) from error
