"""Separate and shared projections, and values from another sequence than the keys."""

import re
from typing import Any

import pytest
import torch

from fuselayers import build
from fuselayers.components import MultiHeadAttention, RotaryPosition
from tests.components.attention.contract import HIDDEN_DIM, made, padding

OPTIONS: list[dict[str, Any]] = [{}, {"num_kv_heads": 2, "qk_norm": "rms_norm", "causal": True}, {"bias": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_separate_projections_compute_what_the_packed_one_does(options: dict[str, Any]) -> None:
    options = {"causal": False, **options}
    separate = made(projections="separate", **options)
    packed, state = made(**options), separate.state_dict()
    for leaf in ("weight", *(["bias"] if options.get("bias", True) else [])):
        state[f"qkv.{leaf}"] = torch.cat([state.pop(f"{part}.{leaf}") for part in "qkv"])
    packed.load_state_dict(state)
    x = torch.randn(4, 7, HIDDEN_DIM, dtype=torch.float64)
    inputs = {"rotate": RotaryPosition().rotate, "key_padding_mask": padding(7)}
    torch.testing.assert_close(separate(x, **inputs), packed(x, **inputs))
    if not options["causal"]:
        memory = torch.randn(4, 5, HIDDEN_DIM, dtype=torch.float64)
        torch.testing.assert_close(separate(x, memory=memory), packed(x, memory=memory))


def test_a_projection_of_another_width_is_an_error() -> None:
    attention = made(projections="separate", causal=False)
    attention.k = torch.nn.Linear(HIDDEN_DIM, HIDDEN_DIM // 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="don't multiply up"):
        attention(torch.randn(2, 7, HIDDEN_DIM, dtype=torch.float64))


@pytest.mark.parametrize("biased", [True, False])
def test_shared_projections_are_separate_ones_with_one_weight(biased: bool) -> None:
    shared = made(projections="shared", causal=False, bias=biased)
    separate = made(projections="separate", causal=False, bias=biased)
    state = shared.state_dict()
    separate.load_state_dict(
        state | {f"{part}{name[1:]}": state[name] for part in "kv" for name in state if name[:2] == "q."}
    )
    x = torch.randn(2, 7, HIDDEN_DIM, dtype=torch.float64)
    torch.testing.assert_close(shared(x), separate(x))
    shared(x).sum().backward()
    separate(x).sum().backward()
    total = sum(getattr(separate, part).weight.grad for part in "qkv")
    torch.testing.assert_close(shared.q.weight.grad, total)


@pytest.mark.parametrize("projections", ["packed", "separate", "shared"])
def test_values_come_from_their_own_sequence(projections: str) -> None:
    layer = made(projections=projections, causal=False)
    x, keys, values = (torch.randn(3, tokens, HIDDEN_DIM, dtype=torch.float64) for tokens in (7, 5, 5))
    mask = padding(5)[:3]  # a row without any token would divide by zero below
    got = layer(x, memory=keys, values=values, key_padding_mask=mask)
    q, k, v = (
        layer.parts(sequence, part)[0].transpose(1, 2) for part, sequence in zip("qkv", (x, keys, values), strict=True)
    )
    scores = (q @ k.mT * layer.scale).masked_fill(~mask[:, None, None], -torch.inf)
    torch.testing.assert_close(got, layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(layer(x, memory=keys, values=keys), layer(x, memory=keys))


def test_a_model_with_separate_projections_is_initialised_as_one_with_a_packed_one() -> None:
    for init in ("gpt2", "deepnorm"):
        sizes = [
            "model.hidden_dim=256",
            "attention.num_heads=4",
            "model.num_layers=1",
            "fusion=off",
            f"model.init={init}",
        ]
        packed, separate = (
            build("gpt_nano", [*sizes, f"attention.projections={projections}"])
            for projections in ("packed", "separate")
        )
        parts = packed.blocks[0].attention.qkv.weight.chunk(3)
        for part, expected in zip("qkv", parts, strict=True):
            got = getattr(separate.blocks[0].attention, part).weight.std()
            torch.testing.assert_close(got, expected.std(), rtol=0.03, atol=0.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"projections": "seperate"}, "no projections 'seperate'; did you mean 'separate'? there are: packed, sep"),
        (
            {"projections": "shared", "num_kv_heads": 2},
            "shared projections need as many key-value heads as query heads, got 2 and 6",
        ),
    ],
)
def test_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        MultiHeadAttention(HIDDEN_DIM, num_heads=6, **options)


def test_errors_of_values() -> None:
    layer, x = made(causal=False), torch.zeros(2, 3, HIDDEN_DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^values must be given with a memory, got \[2, 3, 12\]$"):
        layer(x, values=x)
    with pytest.raises(ValueError, match=r"^values must be \[2, 3, 12\] as the memory is, got \[2, 2, 12\]$"):
        layer(x, memory=x, values=x[:, :2])
