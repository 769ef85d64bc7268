"""The fused loss of the token models, which never holds all logits in memory."""

import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers.components import Choice, Decoder, Encoder, EncoderDecoder, Model
from tests.components.compare import assert_same_values, run
from tests.selection import every_value

VOCABULARY, TOKENS = 4100, 1100
MODELS = [Decoder, Encoder, EncoderDecoder]
TOKENS_BT = torch.arange(2 * TOKENS).view(2, -1) % VOCABULARY
STEP = TOKENS_BT, TOKENS_BT.flip(1).masked_fill(TOKENS_BT % 5 == 0, -100)


def made(model: type[Model], **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_dim": 8, "num_layers": 1, "context_length": TOKENS, "init_std": 0.3}
    # With linear attention no other tensor of the model is as large as the logits.
    return model(**{**sizes, "attention": Choice("linear", {"num_heads": 2}), **options})


def attention_for(model: type[Model]) -> dict[str, Any]:
    looks = {"cross_attention": Choice("multi_head", {"num_heads": 2})}
    return looks if model is EncoderDecoder else {}


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of an op."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for result in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
        return made


@pytest.mark.parametrize(
    ("model", "options"),
    every_value(MODELS, ({"tie_embeddings": True}, {"tie_embeddings": False, "base_width": 4, "init": "mup"})),
)
def test_the_fused_loss_and_its_gradients_are_those_of_the_logits(model: type[Model], options: dict[str, Any]) -> None:
    options = {**options, **attention_for(model)}
    plain = made(model, loss="plain", **options).double()
    fused = made(model, loss="fused", **options).double()
    fused.load_state_dict(plain.state_dict())
    expected, got = (run(either, STEP) for either in (plain, fused))
    assert got["output 0"].dtype == torch.float32
    assert_same_values(expected, got, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model", MODELS)
def test_from_4096_words_on_no_tensor_is_as_large_as_the_logits(model: type[Model]) -> None:
    largest = {}
    for loss in ("auto", "plain"):
        with LargestTensor() as seen:
            run(made(model, loss=loss, **attention_for(model)), STEP)
        largest[loss] = seen.elements
    assert largest["plain"] == TOKENS_BT.numel() * VOCABULARY
    assert largest["auto"] < 0.6 * largest["plain"]


@pytest.mark.parametrize("casts", [{}, {"enabled": True, "dtype": torch.bfloat16}], ids=["bfloat16", "autocast"])
def test_in_16_bits_the_loss_is_float32(casts: dict[str, Any]) -> None:
    model = made(Decoder)
    expected = run(made(Decoder, loss="plain"), STEP)
    with torch.autocast("cpu", **{"enabled": False, **casts}):
        got = run(model if casts else model.bfloat16(), STEP)
    assert got["output 0"].dtype == torch.float32
    torch.testing.assert_close(got["output 0"], expected["output 0"], rtol=0.01, atol=0.0)
    wanted = expected["gradient of token.weight"]
    assert (got["gradient of token.weight"].float() - wanted).norm() < 0.05 * wanted.norm()


def test_capped_logits_have_no_fused_loss() -> None:
    text = "the loss 'fused' cannot cap logits; use 'auto', or leave logit_soft_cap out"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made(Decoder, loss="fused", logit_soft_cap=30.0)
    plain = made(Decoder, loss="plain", logit_soft_cap=0.5)
    assert torch.equal(made(Decoder, logit_soft_cap=0.5)(*STEP), plain(*STEP))
