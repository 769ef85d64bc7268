"""The shipped architectures against `transformers`: the same outputs for the same weights."""

import functools
import importlib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers.components import (
    FusedMLP,
    GatedMLP,
    MixtureOfExperts,
    MultiHeadAttention,
    Norm,
    RelativePosition,
    RotaryPosition,
)
from fuselayers.components.model import Stack
from fuselayers.configs import build, choices
from fuselayers.configs.hugging_face import FAMILIES, load_hugging_face

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# Published counts, and those of `transformers` with the published sizes.
PARAMETERS = {
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gpt2_large": 774_030_080,
    "gpt2_medium": 354_823_168,
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "llama3_2_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
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
    feedforward_bias: bool = False
    gated: bool = False
    windows: tuple[int | None, ...] = (None,)  # of layers in turn
    soft_cap: float | None = None
    logit_soft_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: bool = False
    unit_offset: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    experts: tuple[int, int, float] | None = None  # how many, of which a token passes, coefficient of their balance
    segments: int | None = None
    image: tuple[int, int] | None = None  # size and patch


BIASES = {"attention_bias": True, "feedforward_bias": True}
# config.json of openai-community/gpt2*. Its attn_pdrop of 0.1 is left out, as the file says.
GPT2 = {
    "entries": 50257,
    "context_length": 1024,
    "head_dim": 64,
    "scale": 0.125,
    "activation": "gelu_tanh",
    "norm": "LayerNorm",
    "eps": 1e-5,
    "residual": "PreResidual",
    "position": ("LearnedPosition",),
    "tied": True,
    "dropout": 0.1,
    **BIASES,
}
# google-bert/bert-*-uncased.
BERT = {
    "entries": 30522,
    "context_length": 512,
    "head_dim": 64,
    "scale": 0.125,
    "activation": "gelu",
    "norm": "LayerNorm",
    "eps": 1e-12,
    "residual": "PostResidual",
    "position": ("LearnedPosition",),
    "tied": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "segments": 2,
    **BIASES,
}
# google/vit-*-patch16-224. The context is the 14 x 14 patches and the class token.
VIT = {
    "entries": 1000,
    "context_length": 197,
    "head_dim": 64,
    "scale": 0.125,
    "activation": "gelu",
    "norm": "LayerNorm",
    "eps": 1e-12,
    "residual": "PreResidual",
    "position": ("LearnedPosition",),
    "tied": False,
    "image": (224, 16),
    **BIASES,
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
# Qwen/Qwen3-*. 32,768 is the length of training in their report.
QWEN3 = {
    **GATED,
    "entries": 151936,
    "context_length": 32768,
    "eps": 1e-6,
    "position": ("RotaryPosition", 1000000.0),
    "qk_norm": True,
}

PUBLISHED = {
    "gpt2_small": Published(hidden_dim=768, num_layers=12, num_heads=12, num_kv_heads=12, width=3072, **GPT2),
    "gpt2_medium": Published(hidden_dim=1024, num_layers=24, num_heads=16, num_kv_heads=16, width=4096, **GPT2),
    "gpt2_large": Published(hidden_dim=1280, num_layers=36, num_heads=20, num_kv_heads=20, width=5120, **GPT2),
    "gpt2_xl": Published(hidden_dim=1600, num_layers=48, num_heads=25, num_kv_heads=25, width=6400, **GPT2),
    "bert_base": Published(hidden_dim=768, num_layers=12, num_heads=12, num_kv_heads=12, width=3072, **BERT),
    "bert_large": Published(hidden_dim=1024, num_layers=24, num_heads=16, num_kv_heads=16, width=4096, **BERT),
    "vit_b16": Published(hidden_dim=768, num_layers=12, num_heads=12, num_kv_heads=12, width=3072, **VIT),
    "vit_l16": Published(hidden_dim=1024, num_layers=24, num_heads=16, num_kv_heads=16, width=4096, **VIT),
    "t5_small": Published(
        hidden_dim=512, num_layers=6, num_heads=8, num_kv_heads=8, width=2048, logit_scale=512**-0.5, **OF_T5
    ),
    "t5_base": Published(
        hidden_dim=768, num_layers=12, num_heads=12, num_kv_heads=12, width=3072, logit_scale=768**-0.5, **OF_T5
    ),
    "gemma2_2b": Published(**{**GEMMA2, "num_kv_heads": 4}, hidden_dim=2304, num_layers=26, num_heads=8, width=9216),
    "gemma2_9b": Published(**GEMMA2, hidden_dim=3584, num_layers=42, num_heads=16, width=14336),
    "qwen3_0_6b": Published(hidden_dim=1024, num_layers=28, num_heads=16, width=3072, tied=True, **QWEN3),
    "qwen3_8b": Published(hidden_dim=4096, num_layers=36, num_heads=32, width=12288, tied=False, **QWEN3),
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
    # mistralai/Mistral-7B-v0.1.
    "mistral_7b": Published(
        entries=32000,
        hidden_dim=4096,
        num_layers=32,
        context_length=32768,
        num_heads=32,
        width=14336,
        eps=1e-5,
        position=("RotaryPosition", 10000.0),
        tied=False,
        windows=(4096,),
        **GATED,
    ),
    # mistralai/Mixtral-8x7B-v0.1.
    "mixtral_8x7b": Published(
        entries=32000,
        hidden_dim=4096,
        num_layers=32,
        context_length=32768,
        num_heads=32,
        width=14336,
        eps=1e-5,
        position=("RotaryPosition", 1000000.0),
        tied=False,
        experts=(8, 2, 0.02 / 32),
        **GATED,
    ),
}
# Sizes of our own: nothing is published to compare them with.
OWN = {"gpt_nano", "llama_tiny", "hierarchical_vision"}


@dataclass(frozen=True)
class Twin:
    """A tiny model of ours and the one of `transformers` with its sizes."""

    family: str
    module: str
    model: str
    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)


SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"vocab_size": 256, "d_model": 32, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}


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
    "bert_tiny": Twin(
        "bert", "bert", "BertForMaskedLM", {**SIZES, "intermediate_size": 128, "max_position_embeddings": 64}
    ),
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
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},  # which ties, and leaves the scale out
        T5_1_1_TINY,
    ),
}


def theirs(twin: Twin) -> nn.Module:
    """A model of `transformers`, each weight drawn wide enough for every part to count."""
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


def inputs(twin: Twin) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """What our model and theirs are called with."""
    if twin.family == "vit":
        images = torch.randn(2, 3, 12, 12)
        return (images,), {"pixel_values": images}
    tokens_BT = torch.randint(256, (2, 40))
    if twin.family == "t5":
        targets_BT = torch.randint(256, (2, 23))
        return (tokens_BT, targets_BT), {"input_ids": tokens_BT, "decoder_input_ids": targets_BT}
    return (tokens_BT,), {"input_ids": tokens_BT}


def test_every_shipped_model_is_compared_or_counted() -> None:
    assert {name for name in choices("model") if name.endswith("_tiny")} <= TWINS.keys() | OWN
    assert set(choices("model")) == TWINS.keys() | PARAMETERS.keys() | OWN
    assert {twin.family for twin in TWINS.values()} == set(FAMILIES)


@functools.cache
def of_full_size(name: str) -> Any:
    with torch.device("meta"):
        return build(name, ["fusion=off"])


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters(name: str) -> None:
    assert of_full_size(name).num_parameters() == PARAMETERS[name]


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
    assert (position.interleaved, position.fraction) == (False, 1.0)
    scaling = (position.scaling, position.factor, position.original_length)
    factors = (position.low_frequency_factor, position.high_frequency_factor)
    return "RotaryPosition", position.base, *(() if position.scaling == "none" else (*scaling, *factors))


def what_it_is(model: Any, *, windows: int) -> Published:
    """The same of one of ours, read from its modules; of windows the first few, which come again and again."""
    stacks = parts_of(model, Stack)
    blocks = [block for stack in stacks for block in stack.blocks]
    attentions, mlps = parts_of(model, MultiHeadAttention), parts_of(model, FusedMLP, GatedMLP)
    norms, mixtures = parts_of(model, Norm), parts_of(model, MixtureOfExperts)
    of_windows = tuple(block.attention.window for block in blocks)
    assert of_windows == of_windows[:windows] * (len(of_windows) // windows)
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
        attention_bias=only(getattr(one, part).bias is not None for one in attentions for part in ("qkv", "out")),
        feedforward_bias=only(getattr(one, part).bias is not None for one in mlps for part in ("up", "down")),
        gated=only(isinstance(mlp, GatedMLP) for mlp in mlps),
        windows=of_windows[:windows],
        soft_cap=only(attention.soft_cap for attention in attentions),
        logit_soft_cap=getattr(model, "logit_soft_cap", None),
        logit_scale=model.logit_scale,
        embedding_scale=token is not None and token.scale,
        unit_offset=only(getattr(norm, "unit_offset", False) for norm in norms),
        qk_norm=only(norm is not None for attention in attentions for norm in (attention.q_norm, attention.k_norm)),
        dropout=only(part.dropout for part in (model, *(block.residual for block in blocks))),
        attention_dropout=only(attention.dropout for attention in attentions),
        hidden_dropout=only(mlp.dropout for mlp in mlps),
        experts=only((len(one.experts), one.top_k, one.balance_coefficient) for one in mixtures) if mixtures else None,
        segments=model.segment.num_embeddings if hasattr(model, "segment") else None,
        image=(model.image_size, only(model.patch.projection.kernel_size)) if token is None else None,
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_number_is_the_published_one(name: str) -> None:
    published = PUBLISHED[name]
    assert what_it_is(of_full_size(name), windows=len(published.windows)) == published


@pytest.mark.parametrize("name", TWINS)
def test_the_same_outputs_for_the_same_weights(name: str) -> None:
    twin = TWINS[name]
    other = theirs(twin)
    model = build(name, ["fusion=off", *twin.overrides]).eval()
    load_hugging_face(model, other.state_dict(), family=twin.family)
    assert model.num_parameters() == sum(parameter.numel() for parameter in other.parameters())
    for_us, for_them = inputs(twin)
    with torch.no_grad():
        expected = other(**for_them).logits
        got = model(for_us[0], inputs_BT=for_us[1]) if twin.family == "t5" else model(*for_us)
    # Logits that all but vanish, or are all alike, would agree without proving anything.
    assert expected.std() > 0.03
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral_tiny", "gemma2_tiny", "mixtral_tiny", "t5_tiny"])
def test_fused_models_take_the_same_weights(name: str) -> None:
    twin = TWINS[name]
    state = theirs(twin).state_dict()
    plain, fused = (build(name, [f"fusion={fusion}"]).eval() for fusion in ("off", "eager"))
    for model in (plain, fused):
        load_hugging_face(model, state, family=twin.family)
    for key, tensor in plain.state_dict().items():
        assert torch.equal(fused.state_dict()[key], tensor), key


def small_state(model: nn.Module, family: str = "gpt2") -> dict[str, Tensor]:
    """The weights of a model of ours under their names, without `transformers`."""
    chosen = FAMILIES[family]
    state = {}
    for name, tensor in model.state_dict().items():
        number = re.search(r"(?<=blocks\.)\d+", name)
        form = re.sub(r"(?<=blocks\.)\d+", "{}", name)
        keys = [key for key in chosen.keys if key.ours == form and not re.search(r"\.wi_[01]\.", key.theirs)]
        for key, part in zip(keys, tensor.chunk(len(keys)), strict=True):
            state[key.theirs.format(number[0] if number else "")] = part.T if key.transposed else part
    return state | {one: state[other] for one, other in chosen.repeated.items()}


@pytest.fixture
def gpt2() -> nn.Module:
    return build("gpt2_tiny", ["fusion=off", "model.num_layers=1"])


def test_the_callers_weights_stay_as_they_are(gpt2: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in small_state(gpt2).items()}
    other = build("gpt2_tiny", ["fusion=off", "model.num_layers=1"])
    load_hugging_face(other, state, family="gpt2")
    for name, tensor in gpt2.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, small_state(gpt2)[name]) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["gpt2_tiny", "bert_tiny", "t5_tiny", "llama3_2_1b"])
def test_what_they_repeat_has_to_be_equal(name: str) -> None:
    family, overrides = TWINS[name].family, [*TWINS[name].overrides, "fusion=off"]
    state = small_state(build(name, overrides), family)
    model = build(name, overrides)
    load_hugging_face(model, state, family=family)
    for repeated, other in FAMILIES[family].repeated.items():
        assert torch.equal(state[repeated], state[other])
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        text = f"{repeated} has no place of its own in it, and does not equal {other}"
        with pytest.raises(ValueError, match=f"^the state_dict is no {family} of .*: {re.escape(text)}$"):
            load_hugging_face(model, {**state, repeated: state[other] + 1}, family=family)
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
        # As a file that leaves out what it would repeat.
        load_hugging_face(model, {key: tensor for key, tensor in state.items() if key != repeated}, family=family)


def test_only_what_is_stacked_is_copied_on_the_way() -> None:
    class Copied(TorchDispatchMode):
        sizes: list[int]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.cat.default:
                self.sizes.append(result.numel())
            return result

    for name, stacked in (("gpt2_tiny", 0), ("bert_tiny", 2 * (3 * 32 * 32 + 3 * 32))):
        model, state = build(name, ["fusion=off"]), small_state(build(name, ["fusion=off"]), TWINS[name].family)
        mode = Copied()
        mode.sizes = []
        with mode:
            load_hugging_face(model, state, family=TWINS[name].family)
        assert sum(mode.sizes) == stacked


@pytest.mark.parametrize(
    ("empty", "name", "advice"),
    [
        ("model", "blocks.0.attention.qkv.weight", "call its to_empty first"),
        ("state_dict", "transformer.h.0.attn.c_attn.weight", "load its weights first"),
    ],
)
def test_nothing_is_loaded_where_there_are_no_values(gpt2: nn.Module, empty: str, name: str, advice: str) -> None:
    state = small_state(gpt2)
    if empty == "model":
        gpt2.to("meta")
    else:
        state = {key: tensor.to("meta") for key, tensor in state.items()}
    text = f"{name} of the {empty} is on the meta device, where there are no values; {advice}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        load_hugging_face(gpt2, state, family="gpt2")


def without(state: dict[str, Tensor]) -> None:
    del state["transformer.ln_f.bias"]


def with_another_shape(state: dict[str, Tensor]) -> None:
    state["transformer.wpe.weight"] = torch.zeros(8, 32)


def with_a_stranger(state: dict[str, Tensor]) -> None:
    state["transformer.h.0.attn.rotary"] = torch.zeros(3)


def with_a_head_of_its_own(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = torch.ones(256, 32)


def with_a_layer_too_many(state: dict[str, Tensor]) -> None:
    state["transformer.h.7.ln_1.bias"] = torch.zeros(32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without, "norm.bias is not there"),
        (with_another_shape, "position.table.weight must be [64, 32], got [8, 32]"),
        (with_a_stranger, "transformer.h.0.attn.rotary has no place in it"),
        (
            with_a_head_of_its_own,
            "lm_head.weight has no place of its own in it, and does not equal transformer.wte.weight",
        ),
        (with_a_layer_too_many, "blocks.7.residual.norms.0.bias has no place in it"),
    ],
)
def test_nothing_is_copied_where_something_does_not_fit(
    gpt2: nn.Module, change: Callable[[dict[str, Tensor]], None], said: str
) -> None:
    state = small_state(build("gpt2_tiny", ["fusion=off", "model.num_layers=1"]))
    change(state)
    before = {name: tensor.clone() for name, tensor in gpt2.state_dict().items()}
    text = f"^the state_dict is no gpt2 of this model's size: {re.escape(said)}$"
    with pytest.raises(ValueError, match=text):
        load_hugging_face(gpt2, state, family="gpt2")
    assert all(torch.equal(tensor, before[name]) for name, tensor in gpt2.state_dict().items())


def test_another_family() -> None:
    with pytest.raises(
        ValueError, match=r"^no family 'gpt3'; did you mean 'gpt2'\? there are: bert, gemma2, gpt2, llama"
    ):
        load_hugging_face(nn.Linear(1, 1), {}, family="gpt3")
