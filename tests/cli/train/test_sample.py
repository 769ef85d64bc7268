import pytest
import torch

from fuselayers.cli.train.sample import as_text, printable, sample_text
from fuselayers.components.model import Decoder
from fuselayers.components.registry import Choice


def _decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        vocab_size=300, hidden_dim=8, num_layers=1, context_length=8, attention=Choice("multi_head", {"num_heads": 2})
    )


def test_the_seed_alone_decides_and_nothing_is_changed() -> None:
    model = _decoder().train()
    state = torch.get_rng_state()
    first = sample_text(model, 50, seed=1, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert first == sample_text(model, 50, seed=1, device=torch.device("cpu"))
    assert first != sample_text(model, 50, seed=2, device=torch.device("cpu"))
    assert 0 < len(first) <= 50


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (list(b"a\tb\n"), "a\tb\n"),
        (list("é€".encode()), "é€"),
        ([0xFF, 0x61], "\N{REPLACEMENT CHARACTER}a"),
        (list(b"\x1b]0;title\x07\r\x00"), "·]0;title···"),
        ([299, 0x61], "·a"),
    ],
)
def test_only_what_is_safe_is_printed(tokens: list[int], text: str) -> None:
    assert printable(as_text(tokens)) == text
