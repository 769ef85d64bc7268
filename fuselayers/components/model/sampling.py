"""Generation: tokens are drawn one after the other from a model's logits.

tokens   [B, T]   B batch, T tokens so far
logits   [B, V]   V vocabulary
token    [B]
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from ...partition import disable_fusion
from ..attention import KeyValueCache

# How many tokens are drawn between two checks whether all rows have ended; 1 on other devices. A check waits for the
# GPU.
TOKENS_PER_LOOK: Final = {"cuda": 16}


@contextlib.contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and without fusion, and restore the mode of every module. Used by every `generate`.

    Fused modules would be recompiled for each token.
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
    logits_BV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row from softmax(logits / temperature).

    Args:
        logits_BV: [B, V].
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens may be drawn; None for all.
        top_p: of these, only the fewest and likeliest with this total probability or more; None for all (Holtzman et
            al., "The curious case of neural text degeneration", 2020, section 3.1).
        generator: the random generator; None for torch's default generator.

    >>> next_token(torch.tensor([[0.0, 3.0, 1.0]]), temperature=0.0)
    tensor([1])
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    # With the largest logit at 0, nothing overflows at any temperature.
    logits_BV = logits_BV.float()
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None and top_k < scaled_BV.shape[-1]:
        # Chosen by index, not by a threshold: among equal logits exactly top_k stay.
        values_BK, index_BK = scaled_BV.topk(top_k, dim=-1)
        scaled_BV = torch.full_like(scaled_BV, -torch.inf).scatter(-1, index_BK, values_BK)
    shares_BV = scaled_BV.softmax(-1)
    if top_p is not None and top_p < 1:
        sorted_BV, index_BV = shares_BV.sort(dim=-1, descending=True, stable=True)
        # A token stays if all likelier tokens together have less than top_p. The likeliest always stays.
        enough_BV = sorted_BV.cumsum(-1) - sorted_BV >= top_p
        shares_BV = torch.zeros_like(shares_BV).scatter(-1, index_BV, sorted_BV.masked_fill(enough_BV, 0.0))
    return torch.multinomial(shares_BV, 1, generator=generator)[:, 0]


def continued(
    tokens_BT: Tensor,
    num_tokens: int,
    logits_of: Callable[[Tensor, Sequence[KeyValueCache] | None, int], Tensor],
    draw: Callable[[Tensor], Tensor],
    *,
    context_length: int,
    new_caches: Callable[[int], Sequence[KeyValueCache] | None],
    stop_tokens: Collection[int],
) -> Tensor:
    """Append generated tokens: [B, T + n], n at most num_tokens. Used by every `generate`.

    Args:
        tokens_BT: the tokens so far.
        num_tokens: how many to add.
        logits_of: tokens, caches and the length of the whole sequence -> the logits of the next token. With caches it
            gets the tokens that they do not hold yet, else the last `context_length`.
        draw: logits -> a token per row, as `next_token` does.
        context_length: the maximum number of tokens that the model takes.
        new_caches: capacity -> empty caches, or None. They are dropped when the context is full. From then on each new
            token shifts all others, and everything is recomputed.
        stop_tokens: a row ends with the first of these, and repeats it while other rows continue.
    """
    first, device = tokens_BT.shape[1], tokens_BT.device
    tokens_per_look = TOKENS_PER_LOOK.get(device.type, 1)
    # From page-locked memory, since any other copy waits for the GPU.
    stops_N = torch.tensor(list(stop_tokens), dtype=tokens_BT.dtype, device="cpu", pin_memory=device.type == "cuda")
    stops_N = stops_N.to(device, non_blocking=True)
    ended_B = torch.zeros_like(tokens_BT[:, 0], dtype=torch.bool)
    caches = new_caches(min(context_length, tokens_BT.shape[1] + num_tokens))
    for number in range(1, num_tokens + 1):
        if tokens_BT.shape[1] > context_length:
            caches = None
        newest_BT = tokens_BT[:, -context_length if caches is None else caches[0].length :]
        logits_BV = logits_of(newest_BT, caches, tokens_BT.shape[1])
        token_B = torch.where(ended_B, tokens_BT[:, -1], draw(logits_BV).to(tokens_BT.dtype))
        tokens_BT = torch.cat((tokens_BT, token_B[:, None]), dim=1)
        if len(stops_N):
            ended_B = ended_B | torch.isin(token_B, stops_N)
            if number % tokens_per_look == 0 and number < num_tokens and ended_B.all():
                break
    if not len(stops_N):
        return tokens_BT
    # A row repeats its stop token, so all rows have ended from one column on. The first of these columns stays.
    going_N = ~torch.isin(tokens_BT[:, first:], stops_N).all(0)
    return tokens_BT[:, : first + int(going_N.sum()) + 1]
