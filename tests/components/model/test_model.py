import torch
from torch import Tensor

from fuselayers.components import Choice, Decoder
from fuselayers.partition import fuse


class WithFlag(Decoder):
    """A model with arguments of its own."""

    def forward(self, tokens_BT: Tensor, flag: bool = False) -> Tensor:
        return super().forward(tokens_BT) * (2 if flag else 1)


def test_a_subclass_takes_arguments_of_its_own() -> None:
    sizes = {"vocab_size": 8, "hidden_dim": 8, "num_layers": 1, "context_length": 4}
    model = WithFlag(**sizes, attention=Choice("multi_head", {"num_heads": 2})).eval()
    tokens_BT = torch.zeros(2, 4, dtype=torch.int64)
    once = model(tokens_BT)
    assert torch.equal(model(tokens_BT, flag=True), 2 * once)
    assert torch.equal(fuse(model, backend="eager")(tokens_BT, flag=True), 2 * once)
