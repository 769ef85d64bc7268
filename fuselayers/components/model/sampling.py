"""Generation: tokens are drawn one after the other from a model's logits.

tokens   [B, T]   B batch, T tokens so far
logits   [B, V]   V vocabulary
token    [B]
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ...partition import disable_fusion
from ..attention import KeyValueCache


@contextlib.contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and eagerly, and restore the mode of every module. Used by every `generate`.

    Fused modules run eagerly too: they would be compiled again for each token.
    """
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with disable_fusion():
            yield
    finally:
        for module in in_training:
            module.training = True


def next_token(
    logits_BV: Tensor, *, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), among the `top_k` likeliest.

    >>> next_token(torch.tensor([[0.0, 3.0, 1.0]]), temperature=0.0)
    tensor([1])
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    # With the largest at 0 nothing overflows at any temperature.
    logits_BV = logits_BV.float()
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None and top_k < scaled_BV.shape[-1]:
        # Chosen by index, not by a threshold: among equal logits exactly top_k stay.
        values_BK, index_BK = scaled_BV.topk(top_k, dim=-1)
        scaled_BV = torch.full_like(scaled_BV, -torch.inf).scatter(-1, index_BK, values_BK)
    return torch.multinomial(scaled_BV.softmax(-1), 1, generator=generator)[:, 0]


def continued(
    tokens_BT: Tensor,
    num_tokens: int,
    logits_of: Callable[[Tensor, Sequence[KeyValueCache] | None], Tensor],
    *,
    context_length: int,
    new_caches: Callable[[int], Sequence[KeyValueCache] | None],
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Append generated tokens: [B, T + num_tokens]. Used by every `generate`.

    Args:
        tokens_BT: the tokens so far.
        num_tokens: how many to add.
        logits_of: tokens and caches -> the logits of the next token. With caches it gets the tokens that they do not
            hold yet, else the last `context_length`.
        context_length: the most tokens that the model takes.
        new_caches: capacity -> empty caches, or None. They are dropped when the context is full: from then on each new
            token shifts all others, and everything is recomputed.
        temperature: as for `next_token`.
        top_k: as for `next_token`.
        generator: as for `next_token`.

    Raises:
        ValueError: num_tokens or temperature is negative, or top_k is below one.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (the likeliest token) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for all tokens, got {top_k}")
    caches = new_caches(min(context_length, tokens_BT.shape[1] + num_tokens))
    for _ in range(num_tokens):
        if tokens_BT.shape[1] > context_length:
            caches = None
        newest_BT = tokens_BT[:, -context_length if caches is None else caches[0].length :]
        logits_BV = logits_of(newest_BT, caches)
        token_B = next_token(logits_BV, temperature=temperature, top_k=top_k, generator=generator)
        tokens_BT = torch.cat((tokens_BT, token_B[:, None].to(tokens_BT.dtype)), dim=1)
    return tokens_BT
