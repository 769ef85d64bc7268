"""Text that a trained model writes."""

from typing import Any

import torch

_PROMPT = b"\n"
_TEMPERATURE = 0.8


def sample_text(model: Any, num_bytes: int, *, seed: int, device: torch.device) -> str:
    """Sample from a decoder after a line break, with a separate generator.

    Args:
        model: a decoder of bytes.
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
    return printable(tokens_BT[0, len(_PROMPT) :].tolist())


def printable(tokens: list[int]) -> str:
    """Bytes as text that is safe to print, without escape sequences.

    >>> printable(list(b"if x:\\n\\x1b[2J"))
    'if x:\\n·[2J'
    """
    # A vocabulary may be larger than a byte; replace the other tokens.
    text = bytes(token if token < 256 else 0 for token in tokens).decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
