import pytest
import torch

from fuselayers.components import Choice, Decoder, Encoder

GPT2_SMALL = {
    "vocab_size": 50257,
    "hidden_dim": 768,
    "num_layers": 12,
    "context_length": 1024,
    "attention": Choice("multi_head", {"num_heads": 12}),
}
BERT_BASE = {**GPT2_SMALL, "vocab_size": 30522, "context_length": 512}


@pytest.mark.parametrize("tied", [True, False])
def test_num_parameters_are_the_published_ones_and_a_tie_counts_once(tied: bool) -> None:
    with torch.device("meta"):
        gpt2 = Decoder(**GPT2_SMALL, tie_embeddings=tied)  # type: ignore[arg-type]
        bert = Encoder(**BERT_BASE, tie_embeddings=tied)  # type: ignore[arg-type]
    assert gpt2.num_parameters() == 124_439_808 + (0 if tied else 50257 * 768)
    assert bert.num_parameters() == 109_514_298 + (0 if tied else 30522 * 768)
    gpt2.requires_grad_(False)
    assert gpt2.num_parameters() == 124_439_808 + (0 if tied else 50257 * 768)
