from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A tokenizer with a token for each byte, one for "va", and one that ends a document: 258 of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "va"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("v", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = tmp_path / "a_tokenizer.json"
    tokenizer.save(str(path))
    return path
