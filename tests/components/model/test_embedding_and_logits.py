"""Inputs and outputs of the token models: the chosen embedding, scaled and bounded logits."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import Choice, Decoder, Encoder, EncoderDecoder, VisionTransformer
from tests.components.adapter import Adapter
from tests.components.compare import assert_same_values, run
from tests.components.model.small import made
from tests.components.registered import registered


class NoTable(nn.Module):
    def __init__(self, *, vocab_size: int, hidden_dim: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"logit_scale": 0.25}, lambda logits: logits * 0.25),
        ({"logit_soft_cap": 2.0}, lambda logits: 2 * torch.tanh(logits / 2)),
        ({"logit_scale": 3.0, "logit_soft_cap": 2.0}, lambda logits: 2 * torch.tanh(logits * 1.5)),
    ],
)
def test_logits_are_scaled_and_then_bounded(options: dict[str, float], change: Callable[[Tensor], Tensor]) -> None:
    model, plain = made(Decoder, **options).double(), made(Decoder).double()
    plain.load_state_dict(model.state_dict())
    inputs = [torch.randint(13, (3, 6))]
    expected = run(plain, inputs, call=lambda tokens_BT: change(plain(tokens_BT)))
    assert_same_values(expected, run(model, inputs), rtol=1e-9, atol=1e-9)


TOKENS_BT = torch.tensor([[1, 5, 12], [0, 7, 3]])


def with_a_head(model: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model with an untied head and scaled logits, and its training inputs."""
    scaled = {"base_width": 4, "init": "mup"}
    if model is VisionTransformer:
        built, inputs = made(model, **scaled), (torch.randn(2, 3, 12, 12).double(), torch.tensor([3, 1]))
    else:
        built, inputs = made(model, **scaled, tie_embeddings=False), (TOKENS_BT, TOKENS_BT)
    nn.init.normal_(built.head.weight)
    return built.double(), inputs


MODELS = [Decoder, Encoder, EncoderDecoder, VisionTransformer]


@pytest.mark.parametrize("model", MODELS)
def test_an_adapter_in_place_of_the_head_is_called(model: type[nn.Module]) -> None:
    merged, inputs = with_a_head(model)
    adapted = copy.deepcopy(merged)
    adapted.head = Adapter(adapted.head).double()
    with torch.no_grad():
        merged.head.weight.add_(adapted.head.high @ adapted.head.low)
    loss = adapted(*inputs)
    torch.testing.assert_close(loss, merged(*inputs))
    loss.backward()
    assert adapted.head.low.grad.any()


@pytest.mark.parametrize("model", [Decoder, Encoder])
def test_errors_of_the_embedding(model: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"^no embedding 'tokens'; did you mean 'token'\? there are: patch, token$"):
        made(model, embedding="tokens")
    with pytest.raises(ValueError, match=r"^embedding 'patch' \(.*\) does not take the argument 'vocab_size'$"):
        made(model, embedding=Choice("patch"))
    text = "embedding 'no_table' must be a subclass of nn.Embedding, a table of tokens"
    with registered("embedding", no_table=NoTable), pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        made(model, embedding="no_table")
