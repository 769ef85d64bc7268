"""Text that a trained model writes."""

from collections.abc import Sequence
from typing import Any

import torch

from .data import VOCAB_SIZE

_TEMPERATURE = 0.8
_PROMPT = b"\n"


def sample_text(model: Any, num_bytes: int, *, seed: int, device: torch.device) -> str:
    """Sample from a decoder after a line break, with a separate generator.

    Args:
        model: a decoder.
        num_bytes: length of the text.
        seed: of the generator.
        device: of the model.
    """
    prompt_BT = torch.tensor([list(_PROMPT)], device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            tokens_BT = model.generate(prompt_BT, num_bytes, temperature=_TEMPERATURE, generator=generator)
    finally:
        model.train(was_training)
    return printable(as_text(tokens_BT[0, len(_PROMPT) :].tolist()))


def as_text(tokens: Sequence[int]) -> str:
    """The text of bytes. A model's vocabulary may be larger than a byte; the other tokens are replaced.

    >>> as_text([105, 102])
    'if'
    """
    return bytes(token if token < VOCAB_SIZE else 0 for token in tokens).decode("utf-8", errors="replace")


def printable(text: str) -> str:
    """A text that is safe to print, without escape sequences.

    >>> printable("if x:\\n\\x1b[2J")
    'if x:\\n·[2J'
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
