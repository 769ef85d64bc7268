"""The meaning of a token: a byte, or a piece of text of a `tokenizers` file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_BYTES: Final = 256
# The names that published tokenizers give to the token that ends a document.
_END_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a text.

    Args:
        size: every token is below it.
        prompt: the tokens that a sample begins after.
        tokenizer: the file of the tokenizer; None for bytes.
    """

    size: int = _BYTES
    prompt: tuple[int, ...] = (ord("\n"),)
    tokenizer: Path | None = None

    @property
    def unit(self) -> str:
        """Say in words what a token is."""
        return "byte" if self.tokenizer is None else "token"

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """A function from tokens to text.

        Raises:
            ValueError: the package `tokenizers` is missing, or cannot read the file.

        >>> Vocabulary().decoder()([105, 102])
        'if'
        """
        if self.tokenizer is None:
            return _bytes_as_text
        tokenizer = load_tokenizer(self.tokenizer, used_by="train.sample_bytes")

        def decode(tokens: Sequence[int]) -> str:
            # A model's vocabulary may be larger than the tokenizer's.
            text: str = tokenizer.decode([token for token in tokens if token < self.size], skip_special_tokens=False)
            return text

        return decode


BYTES: Final = Vocabulary()


def load_tokenizer(path: Path, *, used_by: str) -> Any:
    """Read a tokenizer.json.

    Args:
        path: the file.
        used_by: what needs it, for the error.

    Raises:
        ValueError: the package `tokenizers` is missing, or cannot read the file.
    """
    try:
        from tokenizers import Tokenizer  # an optional package
    except ImportError as error:
        raise ValueError(
            f"{used_by} needs the package tokenizers, which cannot be imported: {error}; pip install tokenizers"
        ) from error
    if not hasattr(Tokenizer, "encode_batch_fast"):
        raise ValueError(f"{used_by} needs tokenizers 0.20 or newer; pip install -U tokenizers")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ValueError(f"{path} is not a file of the package tokenizers (tokenizer.json): {error}") from error
    # Published files may cut a text after 512 tokens, or pad it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_size(tokenizer: Any) -> int:
    """One more than the largest id of a tokenizer, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_token_of(tokenizer: Any, name: str | None) -> int:
    """The id of the token that ends a document.

    Args:
        tokenizer: of the package `tokenizers`.
        name: the token; None for the one that the tokenizer has of the usual names.

    Raises:
        ValueError: the tokenizer has no such token, or not exactly one of the usual ones.
    """
    names = _END_TOKENS if name is None else (name,)
    found = [one for one in names if tokenizer.token_to_id(one) is not None]
    if name is not None and not found:
        raise ValueError(f"--end-token must be a token of the tokenizer, got {name!r:.80}")
    if len(found) != 1:
        has = f"has {' and '.join(found)}" if found else f"has none of {', '.join(_END_TOKENS)}"
        raise ValueError(f"the tokenizer {has}; name the token that ends a document: --end-token")
    return int(tokenizer.token_to_id(found[0]))


def _bytes_as_text(tokens: Sequence[int]) -> str:
    # A model's vocabulary may be larger than a byte; replace the other tokens.
    return bytes(token if token < _BYTES else 0 for token in tokens).decode("utf-8", errors="replace")
