"""The shipped architectures against `transformers`: the same outputs for the same weights, the same number of them."""

import os
from typing import Any

import pytest
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {
    **SIZES,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


def gpt2(**sizes: Any) -> nn.Module:
    config = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **sizes}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def bert(**sizes: Any) -> nn.Module:
    config = {**SIZES, "intermediate_size": 128, "max_position_embeddings": 64, **sizes}
    return transformers.BertForMaskedLM(transformers.BertConfig(**config))


def llama3(**sizes: Any) -> nn.Module:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "rms_norm_eps": 1e-5, **rope, **sizes}))
