"""Tiny models of ours and of `transformers` with the same sizes."""

import importlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.configs.hugging_face import FAMILIES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@dataclass(frozen=True)
class Twin:
    """A tiny model of ours, and the model of `transformers` with the same sizes."""

    family: str
    module: str
    model: str
    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)


SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 128, "max_position_embeddings": 64}
T5 = {"vocab_size": 256, "d_model": 32, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
OPT = {**SIZES, "ffn_dim": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
BLOOM = {"vocab_size": 256, "hidden_size": 48, "n_layer": 2, "n_head": 6}


def rope(base: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **scaling}}


LLAMA3_2 = rope(
    500000.0,
    rope_type="llama3",
    factor=32.0,
    original_max_position_embeddings=16,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)

TINY = ["model.vocab_size=256", "model.hidden_dim=32", "model.num_layers=2", "attention.num_heads=4"]
LLAMA_TINY = [*TINY, "attention.num_kv_heads=2", "feedforward.width=64"]
T5_1_1_TINY = [
    *TINY,
    "model.logit_scale=1",
    "attention.head_dim=16",
    "feedforward=gated_mlp",
    "feedforward.width=128",
    "feedforward.activation=gelu_tanh",
]

TWINS = {
    "gpt2_tiny": Twin(
        "gpt2",
        "gpt2",
        "GPT2LMHeadModel",
        {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "bert_tiny": Twin("bert", "bert", "BertForMaskedLM", WIDE),
    "llama3_8b": Twin(
        "llama",
        "llama",
        "LlamaForCausalLM",
        {**LLAMA, "rms_norm_eps": 1e-5, **rope(500000.0)},
        LLAMA_TINY,
    ),
    "llama3_2_1b": Twin(
        "llama",
        "llama",
        "LlamaForCausalLM",
        {**LLAMA, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **LLAMA3_2},
        [*LLAMA_TINY, "position.original_length=16"],
    ),
    "mistral_tiny": Twin(
        "llama", "mistral", "MistralForCausalLM", {**LLAMA, "rms_norm_eps": 1e-5, "sliding_window": 8, **rope(10000.0)}
    ),
    "qwen2_tiny": Twin("qwen2", "qwen2", "Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True, **rope(1000000.0)}),
    "qwen3_tiny": Twin(
        "qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        {**LLAMA, "head_dim": 16, "tie_word_embeddings": True, **rope(1000000.0)},
    ),
    "gemma2_tiny": Twin(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        {**LLAMA, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_implementation": "eager"},
    ),
    "mixtral_tiny": Twin(
        "mixtral",
        "mixtral",
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4, "rms_norm_eps": 1e-5, **rope(1000000.0)},
    ),
    "opt_tiny": Twin("opt", "opt", "OPTForCausalLM", OPT),
    "gpt_neox_tiny": Twin("gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", WIDE),
    "phi_tiny": Twin("phi", "phi", "PhiForCausalLM", WIDE),
    "bloom_tiny": Twin("bloom", "bloom", "BloomForCausalLM", BLOOM),
    "vit_tiny": Twin(
        "vit",
        "vit",
        "ViTForImageClassification",
        {**SIZES, "intermediate_size": 128, "image_size": 12, "patch_size": 4, "num_labels": 10},
    ),
    "t5_tiny": Twin("t5", "t5", "T5ForConditionalGeneration", T5),
    "t5_small": Twin(
        "t5",
        "t5",
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},  # it ties, and leaves the scale out
        T5_1_1_TINY,
    ),
}


def theirs(twin: Twin) -> nn.Module:
    """A model of `transformers`, its weights drawn so wide that every part affects the output."""
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{twin.module}")
    config = getattr(module, twin.model.split("For")[0].replace("LMHeadModel", "") + "Config")(
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **twin.config}
    )
    model: nn.Module = getattr(module, twin.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@torch.no_grad()
def assert_same_outputs(model: nn.Module, other: nn.Module, family: str) -> None:
    """Compare the logits of a model of ours, and of a model of `transformers`."""
    tokens_BT, inputs_BT, images = torch.randint(256, (2, 40)), torch.randint(256, (2, 23)), torch.randn(2, 3, 12, 12)
    if family == "vit":
        expected, got = other(pixel_values=images).logits, model(images)
    elif family == "t5":
        expected = other(input_ids=tokens_BT, decoder_input_ids=inputs_BT).logits
        got = model(tokens_BT, inputs_BT=inputs_BT)
    else:
        expected, got = other(input_ids=tokens_BT).logits, model(tokens_BT)
    # Logits that are near zero, or all alike, would agree without proving anything.
    assert expected.std() > 0.03
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def small_state(model: nn.Module, family: str = "gpt2") -> dict[str, Tensor]:
    """The weights of a model of ours under the names of `transformers`, which is not needed for it."""
    chosen = FAMILIES[family].weights
    state = {}
    for name, tensor in model.state_dict().items():
        number = re.search(r"(?<=blocks\.)\d+", name)
        form = re.sub(r"(?<=blocks\.)\d+", "{}", name)
        keys = [key for key in chosen.keys if key.ours == form and not re.search(r"\.wi_[01]\.", key.theirs)]
        for key, part in zip(keys, tensor.chunk(len(keys)), strict=True):
            before = part.new_zeros(key.first_row, *part.shape[1:])
            part = torch.cat((before, part)) if key.first_row else part
            state[key.theirs.format(number[0] if number else "")] = part.T if key.transposed else part
    return state | {repeated: state[other] for repeated, other in chosen.repeated.items()}
