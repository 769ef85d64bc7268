"""Text that a trained model writes."""

from typing import Any

import torch

from ..vocabulary import Vocabulary

_TEMPERATURE = 0.8


def sample_text(model: Any, num_tokens: int, *, vocabulary: Vocabulary, seed: int, device: torch.device) -> str:
    """Sample from a decoder after a line break, or a document's end, with a separate generator.

    Args:
        model: a decoder.
        num_tokens: length of the text.
        vocabulary: of the text that the model learned from.
        seed: of the generator.
        device: of the model.
    """
    prompt_BT = torch.tensor([vocabulary.prompt], device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            tokens_BT = model.generate(prompt_BT, num_tokens, temperature=_TEMPERATURE, generator=generator)
    finally:
        model.train(was_training)
    return printable(vocabulary.decoder()(tokens_BT[0, len(vocabulary.prompt) :].tolist()))


def printable(text: str) -> str:
    """A text that is safe to print, without escape sequences.

    >>> printable("if x:\\n\\x1b[2J")
    'if x:\\n·[2J'
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
