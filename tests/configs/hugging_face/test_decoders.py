"""Language models against their twins in `transformers`: loss, gradients, padding, generation, every fused form."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.configs import build
from fuselayers.configs.hugging_face import load_hugging_face, matched
from tests.configs.hugging_face.twins import TWINS, theirs

FAMILIES = ["opt_tiny", "gpt_neox_tiny", "phi_tiny", "bloom_tiny", "qwen2_tiny"]


@functools.cache
def pair(name: str) -> tuple[Any, nn.Module]:
    """The model of `transformers`, and ours with its weights, both in eval mode."""
    other = theirs(TWINS[name])
    model = build(name, ["fusion=off", *TWINS[name].overrides]).eval()
    load_hugging_face(model, other.state_dict(), family=TWINS[name].family)
    return other, model


def tokens() -> Tensor:
    return torch.randint(3, 256, (3, 21))


def trained(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(tokens_BT, targets_BT)
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("name", [*FAMILIES, "gpt2_tiny", "llama3_8b"])
def test_the_same_loss_and_gradients(name: str) -> None:
    other, model = pair(name)
    tokens_BT = tokens()
    # `transformers` shifts the labels itself.
    expected = other(input_ids=tokens_BT, labels=tokens_BT).loss
    expected.backward()
    loss, gradients = trained(model, tokens_BT[:, :-1], tokens_BT[:, 1:])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    # A gradient has the layout of its weight.
    of_theirs = {key: parameter.grad for key, parameter in other.named_parameters()}
    wanted = matched(model, of_theirs, family=TWINS[name].family)
    assert gradients.keys() == wanted.keys()
    for key, gradient in gradients.items():
        largest = wanted[key].abs().max().item()
        # A shift of all keys does not change the scores, so the gradient of the bias of keys is all rounding error.
        assert largest > 1e-5, key
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-3, atol=1e-4 * largest, msg=key)


# Padding on the left moves the positions, padding on the right moves the last token.
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits_beside_padding(name: str, side: str) -> None:
    other, model = pair(name)
    tokens_BT = tokens()
    place_BT = torch.arange(21).expand(3, -1)
    padding_B1 = torch.tensor([[0], [4], [13]])
    real_BT = place_BT >= padding_B1 if side == "left" else place_BT < 21 - padding_B1
    with torch.no_grad():
        expected = other(input_ids=tokens_BT, attention_mask=real_BT.long()).logits
        got = model(tokens_BT, key_padding_mask=real_BT)
        torch.testing.assert_close(got[real_BT], expected[real_BT], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens_BT)[2, -1], got[2, -1], atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_writes_the_same_tokens(name: str) -> None:
    other: Any = theirs(TWINS[name])
    with torch.no_grad():
        # Weights so large that the last tokens choose the next token, and not the biases.
        for parameter in other.parameters():
            parameter.mul_(2)
        for module in other.modules():
            if type(module).__name__.endswith("Norm"):
                module.weight.add_(1)
    model: Any = build(name, ["fusion=off"]).eval()
    load_hugging_face(model, other.state_dict(), family=TWINS[name].family)
    prompt_BT = tokens()[:, :9]
    real_BT = torch.arange(9) >= torch.tensor([[0], [3], [7]])
    for mask in (None, real_BT):
        options = {} if mask is None else {"attention_mask": mask.long()}
        expected = other.generate(
            prompt_BT, **options, max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert torch.equal(model.generate(prompt_BT, 16, temperature=0.0, key_padding_mask=mask), expected)
        assert len(expected[:, 9:].unique()) > 4
    assert model.new_caches(25) is not None


SCOPES = [pytest.param("block", marks=pytest.mark.slow), "model"]


@pytest.mark.parametrize("scope", SCOPES)
def test_every_option_fused_learns_the_same(scope: str) -> None:
    options = ["model.num_layers=1", "model.embedding_norm=true", "model.head_bias=true"]
    check_fused("gpt_neox_tiny", ["fusion=eager", f"fusion.scope={scope}"], options)


@pytest.mark.slow
# Two of four pairs: the backend compiles the graphs of either scope in the same way.
@pytest.mark.parametrize(("scope", "backend"), [("block", "eager"), ("model", "inductor")])
@pytest.mark.parametrize("name", FAMILIES)
def test_fused_they_learn_the_same(name: str, backend: str, scope: str) -> None:
    check_fused(name, [f"fusion={backend}", f"fusion.scope={scope}"], [])


def check_fused(name: str, fusion: list[str], options: list[str]) -> None:
    """Compare with dropout, whose masks are the same on every backend."""
    options = [*options, "model.dropout=0.2", "model.embedding_dropout=0.1", "model.init_std=0.2"]
    plain, fused = build(name, ["fusion=off", *options]), build(name, [*fusion, *options])
    fused.load_state_dict(plain.state_dict())
    tokens_BT = tokens()
    results = []
    for model in (plain, fused):
        torch.manual_seed(3)
        results.append(trained(model, tokens_BT[:, :-1], tokens_BT[:, 1:]))
    (loss, gradients), (fused_loss, of_fused) = results
    torch.testing.assert_close(fused_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_fused, gradients, rtol=1e-3, atol=1e-5)
