import pytest
import torch
from torch import Tensor

from fuselayers.components import Choice, Decoder, Encoder
from fuselayers.partition import fuse

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


class WithFlag(Decoder):
    """A model with arguments of its own."""

    def forward(self, tokens_BT: Tensor, flag: bool = False) -> Tensor:  # type: ignore[override]
        return super().forward(tokens_BT) * (2 if flag else 1)


def test_a_subclass_takes_arguments_of_its_own() -> None:
    sizes = {"vocab_size": 8, "hidden_dim": 8, "num_layers": 1, "context_length": 4}
    model = WithFlag(**sizes, attention=Choice("multi_head", {"num_heads": 2})).eval()
    tokens_BT = torch.zeros(2, 4, dtype=torch.int64)
    once = model(tokens_BT)
    assert torch.equal(model(tokens_BT, flag=True), 2 * once)
    assert torch.equal(fuse(model, backend="eager")(tokens_BT, flag=True), 2 * once)
