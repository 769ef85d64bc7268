"""What is published of the shipped models, and the same read from a model of ours."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuselayers.components import (
    Decoder,
    FusedMLP,
    GatedMLP,
    MixtureOfExperts,
    MultiHeadAttention,
    Norm,
    ParallelResidual,
    RelativePosition,
    RotaryPosition,
)
from fuselayers.components.model import Stack
from fuselayers.configs import build

# Published counts, and those of `transformers` with the published sizes.
PARAMETERS = {
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "bloom_560m": 559_214_592,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gpt2_large": 774_030_080,
    "gpt2_medium": 354_823_168,
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "gpt_neox_20b": 20_554_567_680,
    "llama3_2_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "opt_125m": 125_239_296 - 2 * 768,  # rows of positions that no token uses
    "opt_1_3b": 1_315_758_080 - 2 * 2048,
    "phi_2": 2_779_683_840,
    "pythia_160m": 162_322_944,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "t5_base": 222_903_552,
    "t5_small": 60_506_624,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a release says of a model beside its number of parameters, which holds for all of its layers."""

    entries: int  # tokens of the vocabulary, or classes
    hidden_dim: int
    num_layers: int
    context_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    width: int
    activation: str
    norm: str
    eps: float
    residual: str
    position: tuple[Any, ...]
    tied: bool
    attention_bias: bool = False
    qkv_bias: bool | None = None  # where it is not attention_bias
    feedforward_bias: bool = False
    gated: bool = False
    windows: tuple[int | None, ...] = (None,)  # of layers in turn
    soft_cap: float | None = None
    logit_soft_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: bool = False
    unit_offset: bool = False
    qk_norm: bool = False
    norms: int | None = None  # of a block, where the residual style leaves it open
    embedding_norm: bool = False
    head_bias: bool = False
    dropout: float = 0.0
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    experts: tuple[int, int, float] | None = None  # how many, of which a token passes, coefficient of their balance
    segments: int | None = None
    image: tuple[int, int] | None = None  # size and patch


BIASES = {"attention_bias": True, "feedforward_bias": True}
DENSE = {"norm": "LayerNorm", "eps": 1e-5, "residual": "PreResidual", "head_dim": 64, "scale": 0.125, **BIASES}
# config.json of openai-community/gpt2*. Its attn_pdrop of 0.1 is left out, as the file says.
GPT2 = {
    **DENSE,
    "entries": 50257,
    "context_length": 1024,
    "activation": "gelu_tanh",
    "position": ("LearnedPosition",),
    "tied": True,
    "dropout": 0.1,
    "embedding_dropout": 0.1,
}
# google-bert/bert-*-uncased.
BERT = {
    **DENSE,
    "entries": 30522,
    "context_length": 512,
    "activation": "gelu",
    "eps": 1e-12,
    "residual": "PostResidual",
    "position": ("LearnedPosition",),
    "tied": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "segments": 2,
}
# google/vit-*-patch16-224. The context is the 14 x 14 patches and the class token.
VIT = {
    **DENSE,
    "entries": 1000,
    "context_length": 197,
    "activation": "gelu",
    "eps": 1e-12,
    "position": ("LearnedPosition",),
    "tied": False,
    "image": (224, 16),
}
# google-t5/t5-*. Its dropout on the probabilities is left out, as the file says.
OF_T5 = {
    "entries": 32128,
    "context_length": 512,
    "head_dim": 64,
    "scale": 1.0,
    "activation": "relu",
    "norm": "RMSNorm",
    "eps": 1e-6,
    "residual": "PreResidual",
    "position": ("RelativePosition", 32, 128),
    "tied": True,
    "dropout": 0.1,
    "hidden_dropout": 0.1,
}
GATED = {
    "norm": "RMSNorm",
    "residual": "PreResidual",
    "activation": "silu",
    "gated": True,
    "num_kv_heads": 8,
    "head_dim": 128,
    "scale": 1 / math.sqrt(128),
}
# google/gemma-2-*.
GEMMA2 = {
    **GATED,
    "entries": 256000,
    "context_length": 8192,
    "head_dim": 256,
    "scale": 0.0625,  # query_pre_attn_scalar 256
    "activation": "gelu_tanh",
    "eps": 1e-6,
    "residual": "SandwichResidual",
    "position": ("RotaryPosition", 10000.0),
    "tied": True,
    "windows": (4096, None),
    "soft_cap": 50.0,
    "logit_soft_cap": 30.0,
    "embedding_scale": True,
    "unit_offset": True,
}
# facebook/opt-*.
OPT = {
    **DENSE,
    "entries": 50272,
    "context_length": 2048,
    "activation": "relu",
    "position": ("LearnedPosition",),
    "tied": True,
    "dropout": 0.1,
}
# EleutherAI/gpt-neox-20b and pythia-*.
NEOX = {
    **DENSE,
    "context_length": 2048,
    "residual": "ParallelResidual",
    "norms": 2,
    "position": ("RotaryPosition", 10000.0, 0.25),
    "tied": False,
}
# Qwen/Qwen2.5-*.
QWEN2 = {**GATED, "eps": 1e-6, "position": ("RotaryPosition", 1000000.0), "qkv_bias": True}
# Qwen/Qwen3-*. 32,768 is the length of training in their report.
QWEN3 = {
    **GATED,
    "entries": 151936,
    "context_length": 32768,
    "eps": 1e-6,
    "position": ("RotaryPosition", 1000000.0),
    "qk_norm": True,
}
# mistralai/M*-v0.1.
MISTRAL = {
    **GATED,
    "entries": 32000,
    "context_length": 32768,
    "hidden_dim": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "width": 14336,
    "eps": 1e-5,
    "tied": False,
}


def sizes(hidden_dim: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    """Those of a model with as many key-value heads as heads, and a feedforward of four times its width."""
    return {
        "hidden_dim": hidden_dim,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "width": 4 * hidden_dim,
    }


PUBLISHED = {
    "gpt2_small": Published(**GPT2, **sizes(768, 12, 12)),
    "gpt2_medium": Published(**GPT2, **sizes(1024, 24, 16)),
    "gpt2_large": Published(**GPT2, **sizes(1280, 36, 20)),
    "gpt2_xl": Published(**GPT2, **sizes(1600, 48, 25)),
    "bert_base": Published(**BERT, **sizes(768, 12, 12)),
    "bert_large": Published(**BERT, **sizes(1024, 24, 16)),
    "vit_b16": Published(**VIT, **sizes(768, 12, 12)),
    "vit_l16": Published(**VIT, **sizes(1024, 24, 16)),
    "t5_small": Published(**OF_T5, **sizes(512, 6, 8), logit_scale=512**-0.5),
    "t5_base": Published(**OF_T5, **sizes(768, 12, 12), logit_scale=768**-0.5),
    "opt_125m": Published(**OPT, **sizes(768, 12, 12)),
    "opt_1_3b": Published(**OPT, **sizes(2048, 24, 32)),
    "pythia_160m": Published(**NEOX, **sizes(768, 12, 12), entries=50304, activation="gelu"),
    "gpt_neox_20b": Published(
        **{**NEOX, "head_dim": 96, "scale": 1 / math.sqrt(96)},
        **sizes(6144, 44, 64),
        entries=50432,
        activation="gelu_tanh",
    ),
    # microsoft/phi-2.
    "phi_2": Published(
        **{
            **NEOX,
            "head_dim": 80,
            "scale": 1 / math.sqrt(80),
            "norms": 1,
            "position": ("RotaryPosition", 10000.0, 0.4),
        },
        **sizes(2560, 32, 32),
        entries=51200,
        activation="gelu_tanh",
        head_bias=True,
        dropout=0.1,
    ),
    # bigscience/bloom-560m.
    "bloom_560m": Published(
        **DENSE,
        **sizes(1024, 24, 16),
        entries=250880,
        context_length=2048,
        activation="gelu_tanh",
        position=("ALiBiPosition",),
        tied=True,
        embedding_norm=True,
    ),
    "gemma2_2b": Published(**{**GEMMA2, "num_kv_heads": 4}, hidden_dim=2304, num_layers=26, num_heads=8, width=9216),
    "gemma2_9b": Published(**GEMMA2, hidden_dim=3584, num_layers=42, num_heads=16, width=14336),
    "qwen3_0_6b": Published(hidden_dim=1024, num_layers=28, num_heads=16, width=3072, tied=True, **QWEN3),
    "qwen3_8b": Published(hidden_dim=4096, num_layers=36, num_heads=32, width=12288, tied=False, **QWEN3),
    "qwen2_5_0_5b": Published(
        **{**QWEN2, "num_kv_heads": 2, "head_dim": 64, "scale": 0.125},
        entries=151936,
        context_length=32768,
        hidden_dim=896,
        num_layers=24,
        num_heads=14,
        width=4864,
        tied=True,
    ),
    "qwen2_5_7b": Published(
        **{**QWEN2, "num_kv_heads": 4},
        entries=152064,
        context_length=131072,
        hidden_dim=3584,
        num_layers=28,
        num_heads=28,
        width=18944,
        tied=False,
    ),
    # meta-llama/Meta-Llama-3-8B.
    "llama3_8b": Published(
        entries=128256,
        hidden_dim=4096,
        num_layers=32,
        context_length=8192,
        num_heads=32,
        width=14336,
        eps=1e-5,
        position=("RotaryPosition", 500000.0),
        tied=False,
        **GATED,
    ),
    # meta-llama/Llama-3.2-1B.
    "llama3_2_1b": Published(
        **{**GATED, "head_dim": 64, "scale": 0.125},
        entries=128256,
        hidden_dim=2048,
        num_layers=16,
        context_length=131072,
        num_heads=32,
        width=8192,
        eps=1e-5,
        position=("RotaryPosition", 500000.0, "llama3", 32.0, 8192, 1.0, 4.0),
        tied=True,
    ),
    "mistral_7b": Published(**MISTRAL, position=("RotaryPosition", 10000.0), windows=(4096,)),
    "mixtral_8x7b": Published(**MISTRAL, position=("RotaryPosition", 1000000.0), experts=(8, 2, 0.02 / 32)),
}
# Sizes of our own: nothing is published to compare them with.
OWN = {"gpt_nano", "llama_tiny", "hierarchical_vision"}


@functools.cache
def of_full_size(name: str) -> Any:
    with torch.device("meta"):
        return build(name, ["fusion=off"])


def only(values: Iterable[Any]) -> Any:
    """The one value that all have."""
    (value,) = set(values)
    return value


def parts_of(model: nn.Module, *kinds: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kinds)]


def position_of(position: Any) -> tuple[Any, ...]:
    if isinstance(position, RelativePosition):
        return "RelativePosition", position.table.num_embeddings, position.max_distance
    if not isinstance(position, RotaryPosition):
        return (type(position).__name__,)
    assert not position.interleaved
    fraction = () if position.fraction == 1 else (position.fraction,)
    scaling = (position.scaling, position.factor, position.original_length)
    factors = (position.low_frequency_factor, position.high_frequency_factor)
    return "RotaryPosition", position.base, *fraction, *(() if position.scaling == "none" else (*scaling, *factors))


def what_it_is(model: Any, *, windows: int) -> Published:
    """The same of one of ours, read from its modules; of windows the first few, which come again and again."""
    stacks = parts_of(model, Stack)
    blocks = [block for stack in stacks for block in stack.blocks]
    attentions, mlps = parts_of(model, MultiHeadAttention), parts_of(model, FusedMLP, GatedMLP)
    norms, mixtures = parts_of(model, Norm), parts_of(model, MixtureOfExperts)
    of_windows = tuple(block.attention.window for block in blocks)
    assert of_windows == of_windows[:windows] * (len(of_windows) // windows)
    qkv_bias = only(one.qkv.bias is not None for one in attentions)
    token = getattr(model, "token", None)
    return Published(
        entries=token.num_embeddings if token else model.head.out_features,
        hidden_dim=model.hidden_dim,
        num_layers=only(len(stack.blocks) for stack in stacks),
        context_length=only(module.context_length for module in (model, *stacks)),
        num_heads=only(attention.num_heads for attention in attentions),
        num_kv_heads=only(attention.num_kv_heads for attention in attentions),
        head_dim=only(attention.head_dim for attention in attentions),
        scale=only(attention.scale for attention in attentions),
        width=only(mlp.up.out_features for mlp in mlps),
        activation=only(mlp.activation for mlp in mlps),
        norm=only(type(norm).__name__ for norm in norms),
        eps=only(norm.eps for norm in norms),
        residual=only(type(block.residual).__name__ for block in blocks),
        position=only(position_of(stack.position) for stack in stacks),
        tied=token is not None and model.head is None,
        attention_bias=only(one.out.bias is not None for one in attentions),
        qkv_bias=None if qkv_bias == only(one.out.bias is not None for one in attentions) else qkv_bias,
        feedforward_bias=only(getattr(one, part).bias is not None for one in mlps for part in ("up", "down")),
        gated=only(isinstance(mlp, GatedMLP) for mlp in mlps),
        windows=of_windows[:windows],
        soft_cap=only(attention.soft_cap for attention in attentions),
        logit_soft_cap=getattr(model, "logit_soft_cap", None),
        logit_scale=model.logit_scale,
        embedding_scale=token is not None and token.scale,
        unit_offset=only(getattr(norm, "unit_offset", False) for norm in norms),
        qk_norm=only(norm is not None for attention in attentions for norm in (attention.q_norm, attention.k_norm)),
        norms=only(len(block.residual.norms) for block in blocks if isinstance(block.residual, ParallelResidual))
        if parts_of(model, ParallelResidual)
        else None,
        embedding_norm=isinstance(model, Decoder) and model.embedding_norm is not None,
        head_bias=isinstance(model, Decoder) and model.bias is not None,
        dropout=only(part.dropout for part in (model, *(block.residual for block in blocks))),
        embedding_dropout=getattr(model, "embedding_dropout", 0.0),
        attention_dropout=only(attention.dropout for attention in attentions),
        hidden_dropout=only(mlp.dropout for mlp in mlps),
        experts=only((len(one.experts), one.top_k, one.balance_coefficient) for one in mixtures) if mixtures else None,
        segments=model.segment.num_embeddings if hasattr(model, "segment") else None,
        image=(model.image_size, only(model.patch.projection.kernel_size)) if token is None else None,
    )
