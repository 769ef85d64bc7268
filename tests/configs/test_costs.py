import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import Choice, names, register
from fuselayers.components.attention.inputs import is_able
from fuselayers.configs import ModelCosts, build, model_costs
from fuselayers.partition import saved_bytes

SMALL = ["model.hidden_dim=32", "model.num_layers=2", "model.context_length=17", "model.vocab_size=61"]


def small(model: str) -> list[str]:
    heads = ["attention.num_heads=4", *(["attention.num_kv_heads=2"] if model == "llama_tiny" else [])]
    return [f"model={model}", "fusion=off", *SMALL, *heads]


@functools.cache
def costs_of(*overrides: str) -> ModelCosts:
    """The costs of a small model, counted once for all tests."""
    return model_costs(overrides=overrides)


def test_gpt2_small_costs_what_its_published_sizes_say() -> None:
    layers, width, vocabulary, tokens = 12, 768, 50257, 1024
    costs = model_costs("gpt2_small")
    assert (costs.parameters, costs.tokens) == (124_439_808, tokens)
    assert costs.parameters - costs.embedding_parameters == 124_439_808 - (vocabulary + tokens) * width
    # Per layer: queries, keys, values and output 4 D^2, the mlp 8 D^2; scores and weighted values 2 T D each.
    matrices = layers * 12 * width * width
    attention = layers * 2 * 2 * tokens * width
    head = 2 * vocabulary * width
    assert costs.forward_flops / costs.tokens == 2 * matrices + attention + head
    assert costs.backward_flops == 2 * costs.forward_flops
    # The usual estimate counts biases and norms too, which are few.
    weights = costs.parameters - costs.embedding_parameters
    assert costs.forward_flops / costs.tokens == pytest.approx(2 * weights + attention + head, rel=1e-3)


def test_a_mixture_counts_the_experts_that_a_token_passes() -> None:
    width, layers, tokens, vocabulary, hidden, experts = 32, 2, 64, 256, 64, 4
    costs = model_costs("mixtral_tiny")
    attention_weights = 2 * width * width + 2 * width * width // 2
    a_token_passes = 2 * 3 * width * hidden + width * experts
    weights = layers * (attention_weights + a_token_passes) + vocabulary * width
    assert costs.forward_flops / costs.tokens == 2 * weights + layers * 4 * tokens * width


# Costs are those of the formulas. In a block the kernels save two more numbers for each row of a norm.
KERNELS = 0.01


def parts_of_every_kind() -> list[list[str]]:
    # The case of fused_mlp is the default model, with transformer blocks and multi-head attention.
    overrides = [[f"feedforward={name}"] for name in names("feedforward")]
    overrides += [
        [
            "model.name=decoder" if is_able(name, "causal") else "model.name=encoder",
            "position=none",
            f"attention={name}",
        ]
        for name in names("attention")
        if name != "multi_head"
    ]
    return [*overrides, ["model.name=encoder_decoder"], ["model.block=reversible", "attention.dropout=0.1"]]


@pytest.mark.parametrize("parts", parts_of_every_kind(), ids=" ".join)
def test_every_part_is_counted(parts: list[str]) -> None:
    overrides = [*SMALL, "model.num_layers=1", "model.context_length=16", "fusion=off", *parts]
    costs = costs_of(*overrides)
    model: Any = build(overrides=overrides)
    assert costs.forward_flops > 0
    assert costs.backward_flops > costs.forward_flops
    for dtype, counted in ((torch.float32, costs.float32_bytes), (torch.bfloat16, costs.bfloat16_bytes)):
        built = model.to(dtype)
        inputs = built.example_inputs(device="cpu")
        assert saved_bytes(built, *inputs, parameters=built.buffers()) == pytest.approx(counted, rel=KERNELS)
        assert counted > 0
    assert costs.bfloat16_bytes < costs.float32_bytes


def test_the_fused_loss_keeps_the_gradient_of_the_table_in_place_of_the_logits() -> None:
    # Its FLOPs are counted as those of the plain loss, although forward computes the head's gradients.
    words, width, tokens = 5000, 32, 33
    sizes = [*small("gpt_nano"), f"model.vocab_size={words}", f"model.context_length={tokens}"]
    plain, fused = (costs_of(*sizes, f"model.loss={loss}") for loss in ("plain", "fused"))
    assert (fused.forward_flops, fused.backward_flops) == (plain.forward_flops, plain.backward_flops)
    assert plain.float32_bytes - fused.float32_bytes > 4 * (tokens - width) * words - 8 * tokens * width
    assert fused.bfloat16_bytes < plain.bfloat16_bytes


def test_reversible_blocks_run_forward_twice_and_keep_two_streams() -> None:
    layers, width, vocabulary, tokens = 2, 32, 61, 17
    plain = costs_of(*small("gpt_nano"))
    costs = costs_of(*small("gpt_nano"), "model.block=reversible")
    head = 2 * vocabulary * width * tokens
    assert costs.forward_flops == plain.forward_flops
    assert costs.backward_flops == plain.backward_flops + plain.forward_flops - head
    deeper = [word.replace(f"num_layers={layers}", f"num_layers={3 * layers}") for word in small("gpt_nano")]
    more = costs_of(*deeper, "model.block=reversible")
    assert more.float32_bytes == costs.float32_bytes
    assert more.forward_flops - head == 3 * (costs.forward_flops - head)


def test_nothing_is_drawn_and_the_default_device_does_not_matter() -> None:
    expected = costs_of(*small("bert_base"))
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert model_costs(overrides=small("bert_base")) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_any_size_takes_no_memory() -> None:
    costs = model_costs("gpt2_small", ["model.num_layers=1", "model.hidden_dim=98304", "attention.num_heads=96"])
    assert costs.parameters > 100e9
    assert costs.float32_bytes > 5e9


class Silent(nn.Module):
    built_in = frozenset({"attention", "feedforward", "norm", "residual", "position"})

    def __init__(
        self, *, attention: Choice, feedforward: Choice, norm: Choice, residual: Choice, position: Choice
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)


class Fickle(Silent):
    context_length = 4

    def example_inputs(self, batch_size: int = 1, device: str = "meta") -> tuple[Tensor]:
        return (torch.zeros(batch_size, 4, 3, device=device),)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x > 0].view(-1, 3)).sum()


class OfNumbers(Fickle):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


@pytest.mark.usefixtures("own_components")
def test_a_model_of_other_inputs_is_counted_by_what_it_says() -> None:
    register("model", "of_numbers")(OfNumbers)
    costs = model_costs({"model": {"name": "of_numbers"}, "feedforward": {"dropout": 0.0}})
    assert costs.forward_flops / costs.tokens == 2 * 3 * 5
    # Backward computes the gradient of the weight alone; the input needs none.
    assert costs.backward_flops == costs.forward_flops
    assert (costs.float32_bytes, costs.bfloat16_bytes) == (4 * 3 * 4, 4 * 3 * 2)


@pytest.mark.usefixtures("own_components")
@pytest.mark.parametrize(
    ("component", "text"),
    [
        (
            Silent,
            "{} of model 'odd' needs a method "
            'example_inputs(batch_size=1, device="meta") and an attribute context_length',
        ),
        (Fickle, "the costs of model 'odd' cannot be counted, since its computation depends on values: "),
    ],
)
def test_a_model_that_cannot_be_counted(component: type, text: str) -> None:
    register("model", "odd")(component)
    text = text.format(component.__name__)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        model_costs({"model": {"name": "odd"}, "feedforward": {"dropout": 0.0}})
