"""from_pretrained against `transformers`: folders that it wrote, files as they are on the hub, and damaged ones."""

import dataclasses
import importlib
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuselayers
from fuselayers.configs import build, from_pretrained
from fuselayers.configs.hugging_face_config import READERS, config_of
from fuselayers.partition import FusedModule
from tests.configs.test_hugging_face import (
    LLAMA,
    PUBLISHED,
    TWINS,
    Twin,
    inputs,
    rope,
    small_state,
    theirs,
    what_it_is,
)

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

OFF = ["fusion=off"]
STRETCHED = {
    "linear": rope(10000.0, rope_type="linear", factor=4.0),
    "yarn": rope(10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn_factors": rope(
        *(10000.0,),
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        attention_factor=1.3,
        beta_fast=16.0,
        beta_slow=2.0,
    ),
}
WRITTEN = {
    **TWINS,
    **{name: Twin("llama", "llama", "LlamaForCausalLM", {**LLAMA, **scaled}) for name, scaled in STRETCHED.items()},
    "gpt2_untied": dataclasses.replace(
        TWINS["gpt2_tiny"], config={**TWINS["gpt2_tiny"].config, "tie_word_embeddings": False}
    ),
    "gemma2_types": dataclasses.replace(
        TWINS["gemma2_tiny"],
        config={**TWINS["gemma2_tiny"].config, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}


def changed(folder: Path, **fields: Any) -> None:
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def write(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A folder as the first GPT-2 files: no prefix, stored masks, no tied head, few fields."""
    state = {name.removeprefix("transformer."): one for name, one in small_state(build("gpt2_tiny", OFF)).items()}
    del state["lm_head.weight"]
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    return write(tmp_path, GPT2, state)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_transformers_wrote_gives_its_outputs(name: str, tmp_path: Path) -> None:
    twin = WRITTEN[name]
    other = theirs(twin)
    other.save_pretrained(tmp_path)  # type: ignore[operator]
    model = from_pretrained(tmp_path, OFF)
    assert not model.training
    for_us, for_them = inputs(twin)
    with torch.no_grad():
        expected = other(**for_them).logits
        got = model(for_us[0], inputs_BT=for_us[1]) if twin.family == "t5" else model(*for_us)
    assert expected.std() > 0.03
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_every_model_type_is_compared() -> None:
    assert {twin.module for twin in WRITTEN.values()} == set(READERS)


def test_shards(tmp_path: Path) -> None:
    other: Any = theirs(TWINS["mixtral_tiny"])
    other.save_pretrained(tmp_path / "one")
    other.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (from_pretrained(tmp_path / name, OFF).state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_text_in_five_lines(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"the": 0, "moon": 1, **{f"w{n}": n for n in range(2, 256)}}, "the")
    written = tokenizers.Tokenizer(words)
    written.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    other: Any = theirs(TWINS["gpt2_tiny"])
    other.save_pretrained(tmp_path)
    written.save(str(tmp_path / "tokenizer.json"))

    model: Any = fuselayers.from_pretrained(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode("the moon").ids])
    text = tokenizer.decode(model.generate(prompt, 8, temperature=0.0)[0].tolist())

    assert isinstance(model, FusedModule)
    expected = other.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert text == tokenizer.decode(expected[0].tolist())


def test_dtype_and_device(gpt2: Path) -> None:
    def dtypes(**options: Any) -> set[torch.dtype]:
        return {one.dtype for one in from_pretrained(gpt2, OFF, **options).state_dict().values()}

    assert dtypes() == {torch.float32}
    assert dtypes(dtype=torch.float16) == {torch.float16}
    changed(gpt2, torch_dtype="bfloat16")
    assert dtypes() == {torch.bfloat16}
    changed(gpt2, dtype="float64")  # the newer name
    assert dtypes() == {torch.float64}
    assert dtypes(dtype=torch.float32) == {torch.float32}
    on_meta = from_pretrained(gpt2, OFF, device="meta")
    assert {one.device.type for one in on_meta.state_dict().values()} == {"meta"}


def test_overrides_and_training(gpt2: Path) -> None:
    model: Any = from_pretrained(gpt2, [*OFF, "attention.dropout=0", "model.dropout=0"])
    assert model.built_from.attention.options["dropout"] == 0
    assert model.built_from.model.options["context_length"] == 64
    model.train()
    tokens_BT = torch.randint(256, (2, 9))
    model(tokens_BT, tokens_BT).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    relu = fuselayers.rebuild(model, ["feedforward.activation=relu"])
    assert torch.equal(relu.state_dict()["token.weight"], model.token.weight)


def test_the_files_may_change_afterwards(gpt2: Path) -> None:
    model = from_pretrained(gpt2, OFF)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (gpt2 / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(tensor.is_contiguous() for tensor in before.values())


def test_a_repository_of_the_hub(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, Any]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert allow_patterns == [
            *("config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
        ]
        asked.append((name, revision))
        return str(gpt2)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    for name in ("gpt2", "openai-community/gpt2"):
        assert type(from_pretrained(name, OFF, revision="v2")).__name__ == "Decoder"
    assert asked == [("gpt2", "v2"), ("openai-community/gpt2", "v2")]


@pytest.mark.parametrize(
    ("library", "name", "wish"),
    [
        ("huggingface_hub", "openai-community/gpt2", "'openai-community/gpt2' is no folder here, and to download it"),
        ("safetensors", "", "to read the weights of '"),
    ],
)
def test_a_missing_library(library: str, name: str, wish: str, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    text = rf"^{wish}.* needs {library}; install it with: pip install 'fuselayers\[hub\]'$"
    with pytest.raises(ImportError, match=text):
        from_pretrained(name or gpt2, OFF)


def test_names_in_older_files() -> None:
    """As the files of the first releases, which hold more than the model uses."""
    from fuselayers.configs.hugging_face import matched

    bert = {
        re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)): one
        for name, one in small_state(build("bert_tiny", OFF), "bert").items()
    }
    bert |= {"cls.seq_relationship.bias": torch.zeros(2), "bert.embeddings.position_ids": torch.arange(64)[None]}
    llama = small_state(build("llama3_8b", [*TWINS["llama3_8b"].overrides, *OFF]), "llama")
    llama["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    t5 = small_state(build("t5_tiny", OFF), "t5")
    t5["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    vit = small_state(build("vit_tiny", OFF), "vit")
    vit["vit.pooler.dense.bias"] = torch.zeros(32)
    assert any("gamma" in name for name in bert)
    for name, state in (("bert_tiny", bert), ("llama3_8b", llama), ("t5_tiny", t5), ("vit_tiny", vit)):
        wanted = build(name, [*TWINS[name].overrides, *OFF]).state_dict()
        assert matched(wanted, state, family=TWINS[name].family).keys() == wanted.keys()


# As on the hub, in the words of the `transformers` of their time, without the fields about tokens and tasks.
ROTARY = {"hidden_act": "silu", "tie_word_embeddings": False, "num_key_value_heads": 8, "num_attention_heads": 32}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BIG = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000}
ON_THE_HUB: dict[str, dict[str, Any]] = {
    "gpt2_small": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_ctx": 1024,
        "n_positions": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "vocab_size": 50257,
    },
    "bert_base": {
        **BASE,
        "model_type": "bert",
        "hidden_act": "gelu",
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": 30522,
    },
    "llama3_8b": {
        **ROTARY,
        **BIG,
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "llama3_2_1b": {
        **ROTARY,
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_hidden_layers": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "mistral_7b": {
        **ROTARY,
        **BIG,
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "mixtral_8x7b": {
        **ROTARY,
        **BIG,
        "model_type": "mixtral",
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "gemma2_2b": {
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "qwen3_0_6b": {
        **ROTARY,
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "vit_b16": {
        **BASE,
        "model_type": "vit",
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "id2label": {str(number): f"class {number}" for number in range(1000)},
        "image_size": 224,
        "layer_norm_eps": 1e-12,
        "num_channels": 3,
        "patch_size": 16,
        "qkv_bias": True,
    },
    "t5_small": {
        "model_type": "t5",
        "d_ff": 2048,
        "d_kv": 64,
        "d_model": 512,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-06,
        "n_positions": 512,
        "num_heads": 8,
        "num_layers": 6,
        "relative_attention_num_buckets": 32,
        "vocab_size": 32128,
    },
}
# Where the shipped model deviates from the release, as its file says.
DEVIATES: dict[str, dict[str, Any]] = {
    "gpt2_small": {"attention_dropout": 0.1},
    "t5_small": {"attention_dropout": 0.1},
    "qwen3_0_6b": {"context_length": 40960},
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_released_config_gives_the_shipped_model(name: str) -> None:
    _, config = config_of(ON_THE_HUB[name])
    with torch.device("meta"):
        model = build(config, OFF)
    published = PUBLISHED[name]
    expected = dataclasses.replace(published, **DEVIATES.get(name, {}))
    assert what_it_is(model, windows=len(published.windows)) == expected


# What decides nothing that is loaded: tokens, initial values, the heads of other tasks, and how transformers runs.
WITHOUT_EFFECT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "initializer_factor", "use_cache"),
    *("classifier_dropout", "pooler_act", "pooler_output_size", "encoder_stride", "output_router_logits"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("pretraining_tp", "reorder_and_upcast_attn", "is_encoder_decoder", "is_decoder"),
    *("dense_act_fn", "is_gated_act"),  # of T5, made from feed_forward_proj
    *("max_window_layers", "sliding_window"),  # of Qwen3, where use_sliding_window is off
}


@pytest.mark.parametrize("model_type", READERS)
def test_every_field_of_transformers_is_read_or_without_effect(model_type: str) -> None:
    from transformers import PretrainedConfig

    read: set[str] = set()

    class Recorded(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

    twin = next(twin for twin in TWINS.values() if twin.module == model_type)
    module = importlib.import_module(f"transformers.models.{model_type}")
    kind = getattr(module, twin.model.split("For")[0].replace("LMHeadModel", "") + "Config")
    content = kind(**twin.config).to_dict()
    config_of(Recorded(content))
    assert "model_type" in read
    # The sizes of the tests give even images a vocabulary.
    others = {*PretrainedConfig().to_dict(), *(("vocab_size",) if model_type == "vit" else ())}
    assert content.keys() - others - read - WITHOUT_EFFECT == set()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt3"}, "no model_type (of config.json) 'gpt3'; did you mean 'gpt2'? there are: bert, gemma2, "),
    ({"model_type": ["gpt2"]}, "no model_type (of config.json) ['gpt2']; there are: bert"),
    ({"n_embd": None}, "config.json has no n_embd, which its model_type needs"),
    ({"n_embd": "big"}, "n_embd of config.json must be a whole number from 1 on, got 'big'"),
    ({"n_layer": "${oc.env:HOME}"}, "model.num_layers"),
    ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx = True; this library has only F"),
    ({"activation_function": "tanh"}, "no activation (activation_function of config.json) 'tanh'; there are: gelu, "),
    ({"embd_pdrop": 0.2}, "resid_pdrop and embd_pdrop of config.json must be equal, got 0.1 and 0.2; this library"),
    ({"quantization_config": {"bits": 4}}, "config.json has a quantization_config; quantized weights are not read"),
    ({"dtype": "float8"}, "dtype of config.json must be a floating dtype of torch, got 'float8'; pass dtype="),
    ({"n_layer": 1}, "the state_dict is no gpt2 of this model's size: blocks.1."),
    ({"n_layer": 3}, "the state_dict is no gpt2 of this model's size: blocks.2."),
    ({"n_embd": 36}, "the state_dict is no gpt2 of this model's size: blocks.0.attention.qkv.bias must be [108], g"),
    ({"tie_word_embeddings": False}, "the state_dict is no gpt2 of this model's size: head.weight is not there"),
    ({"n_layer": 10**6, "n_embd": 10**6, "n_head": 10**6}, "needs at least "),
]


@pytest.mark.parametrize(("fields", "text"), WRONG)
def test_a_config_that_cannot_be(fields: dict[str, Any], text: str, gpt2: Path) -> None:
    changed(gpt2, **fields)
    with pytest.raises(ValueError, match=re.escape(text)):
        from_pretrained(gpt2, OFF)


def no_number(value: Any) -> str:
    return f"must be a number from 0 on, got {value!r}"


LLAMA_JSON = {"model_type": "llama", **ROTARY, **BIG, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"attention_bias": True}, "config.json has attention_bias = True; this library has only False"),
        ({"mlp_bias": True}, "config.json has mlp_bias = True; this library has only False"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "no kind of rotary positions (rope_type of config.json) 'd",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}},
            "has beta_fast = 1 for rotary positions, wh",
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters of config.json must be one mapping for all layer",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "truncate": False, "factor": 2}},
            "config.json has truncate = False",
        ),
        (
            {"model_type": "mistral", "layer_types": ["full_attention"]},
            "layer_types = ['full_attention']; this library",
        ),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1; this library has only 0.0"),
        ({"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": "x"}, no_number("x")),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types of config.json must be full_attentio",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention = True; this libr",
        ),
        ({"model_type": "gemma2", "query_pre_attn_scalar": True}, no_number(True)),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window = True; this library has only False"),
        (
            {"model_type": "bert", "hidden_act": "relu"},
            "config.json has hidden_act = 'relu'; this library has only 'gelu'",
        ),
        ({"model_type": "bert", "is_decoder": True}, "config.json has is_decoder = True; this library has only False"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "this library has only 'absolute'"),
        ({"model_type": "vit", "image_size": [4, 8]}, "image_size of config.json must be square, got [4, 8]"),
        ({"model_type": "vit", "id2label": 3}, "id2label of config.json must name the classes, got 3"),
        ({"model_type": "t5", "d_model": 8, "feed_forward_proj": "a-relu"}, "must be relu or gated-gelu, got a-relu"),
    ],
)
def test_a_field_that_asks_for_something_else(content: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        config_of({**LLAMA_JSON, **content})


def test_yarn_without_an_original_length_takes_that_of_the_model() -> None:
    _, config = config_of({**LLAMA_JSON, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert config["position"] == {"base": 10000.0, "scaling": "yarn", "factor": 4.0, "original_length": 64}


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_a_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def with_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def with_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])


def with_a_lost_shard(folder: Path) -> None:
    index = {"weight_map": {"wte.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_an_empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        (without_config, FileNotFoundError, "has no config.json, which every checkpoint has"),
        (with_a_broken_config, ValueError, "config.json' is no JSON: "),
        (with_a_list, ValueError, "config.json' must hold a mapping, got [1]"),
        (
            with_pickle,
            FileNotFoundError,
            "has neither model.safetensors nor model.safetensors.index.json; files of pick",
        ),
        (cut_off, ValueError, "model.safetensors' is damaged: "),
        (with_a_lost_shard, FileNotFoundError, "lacks model-00001-of-00001.safetensors, which model.safetensors.index"),
        (with_an_empty_index, ValueError, "must hold a weight_map from tensors to files"),
    ],
)
def test_a_damaged_folder(damage: Callable[[Path], None], kind: type[Exception], text: str, gpt2: Path) -> None:
    damage(gpt2)
    with pytest.raises(kind, match=re.escape(text)):
        from_pretrained(gpt2, OFF)


@pytest.mark.parametrize("scope", ["layer", "block", "model"])
def test_fused_models_take_the_weights_too(scope: str, gpt2: Path) -> None:
    tokens_BT = torch.arange(12)[None]
    plain: Any = from_pretrained(gpt2, OFF)
    fused: Any = from_pretrained(gpt2, ["fusion=eager", f"fusion.scope={scope}"])
    assert torch.equal(fused.generate(tokens_BT, 4, temperature=0.0), plain.generate(tokens_BT, 4, temperature=0.0))


def test_what_is_neither_a_folder_nor_a_repository(tmp_path: Path) -> None:
    for wrong in (tmp_path / "gone", "./gone", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=r"^there is no folder '.*(gone|c)'; name a folder, or a reposit"):
            from_pretrained(wrong)
    with pytest.raises(ValueError, match=r"^'gpt2_small' is an architecture without weights, for fuselayers.build; na"):
        from_pretrained("gpt2_small")


def test_weights_of_another_task_are_refused(gpt2: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(gpt2 / "model.safetensors")
    write(gpt2, GPT2, {**state, "score.weight": torch.zeros(2, 32)})
    with pytest.raises(ValueError, match=r"^the state_dict is no gpt2 of this model's size: score.weight has no place"):
        from_pretrained(gpt2, OFF)


def test_the_scale_of_the_scores_is_theirs() -> None:
    _, config = config_of({**ON_THE_HUB["gemma2_2b"], "query_pre_attn_scalar": 144})
    assert math.isclose(config["attention"]["scale"], 1 / 12)


def test_packed_layers_take_the_same_weights(tmp_path: Path) -> None:
    other: Any = theirs(TWINS["mistral_tiny"])
    other.save_pretrained(tmp_path)
    tokens_BT = torch.randint(256, (2, 40))
    models: list[nn.Module] = [
        from_pretrained(tmp_path, [*OFF, f"feedforward.packed={on}"]) for on in ("true", "false")
    ]
    with torch.no_grad():
        packed, plain = (model(tokens_BT) for model in models)
    torch.testing.assert_close(packed, plain)
