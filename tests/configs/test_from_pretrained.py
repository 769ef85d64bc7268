"""from_pretrained against `transformers`: folders that it wrote, files as on the hub, and damaged files."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fuselayers
from fuselayers.configs import build, from_pretrained
from fuselayers.configs.hugging_face import FAMILIES, matched
from tests.configs.hugging_face.twins import LLAMA, TWINS, Twin, assert_same_outputs, rope, small_state, theirs

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

OFF = ["fusion=off"]
STRETCHED = {
    "linear": rope(10000.0, rope_type="linear", factor=4.0),
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


def varied(name: str, **config: Any) -> Twin:
    return dataclasses.replace(TWINS[name], config={**TWINS[name].config, **config})


# At least one of each model_type; hugging_face/test_load.py compares the other sizes.
WRITTEN = {
    **{
        name: TWINS[name] for name in ("bert_tiny", "mistral_tiny", "mixtral_tiny", "qwen3_tiny", "t5_tiny", "vit_tiny")
    },
    **{name: Twin("llama", "llama", "LlamaForCausalLM", {**LLAMA, **scaled}) for name, scaled in STRETCHED.items()},
    "gpt2_untied": varied("gpt2_tiny", tie_word_embeddings=False),
    "opt_post_norm": varied("opt_tiny", do_layer_norm_before=False),
    "opt_without_biases": varied("opt_tiny", enable_bias=False, tie_word_embeddings=False, activation_function="gelu"),
    "gpt_neox_in_turn": varied("gpt_neox_tiny", use_parallel_residual=False, attention_bias=False),
    "gpt_neox_tied": varied("gpt_neox_tiny", tie_word_embeddings=True, rotary_pct=1.0, rotary_emb_base=500.0),
    "gpt_neox_yarn": varied("gpt_neox_tiny", hidden_size=64, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "phi_normed": varied("phi_tiny", qk_layernorm=True, layer_norm_eps=1e-3, num_key_value_heads=2),
    "phi_tied": varied("phi_tiny", tie_word_embeddings=True, partial_rotary_factor=0.25),
    "bloom_untied": varied("bloom_tiny", n_head=3, tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    "bloom_8_heads": varied("bloom_tiny", n_head=8),
    "qwen2_untied": varied("qwen2_tiny", tie_word_embeddings=False, num_key_value_heads=4, head_dim=16),
    "gemma2_types": varied("gemma2_tiny", layer_types=["full_attention", "sliding_attention"]),
}


def changed(folder: Path, **fields: Any) -> None:
    """Change fields of a config.json; None removes a field."""
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
    """A folder like the first GPT-2 files: no prefix, stored masks, no tied head, few fields."""
    state = {name.removeprefix("transformer."): tensor for name, tensor in small_state(build("gpt2_tiny", OFF)).items()}
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
    assert_same_outputs(model, other, twin.family)


def test_every_model_type_is_compared() -> None:
    assert {twin.module for twin in WRITTEN.values()} == set(FAMILIES)


def test_shards(tmp_path: Path) -> None:
    other: Any = theirs(TWINS["mixtral_tiny"])
    other.save_pretrained(tmp_path / "one")
    other.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    whole, sharded = (from_pretrained(tmp_path / name, OFF).state_dict() for name in ("one", "many"))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_dtype_and_device(gpt2: Path) -> None:
    def dtypes(**options: Any) -> set[torch.dtype]:
        return {tensor.dtype for tensor in from_pretrained(gpt2, OFF, **options).state_dict().values()}

    assert dtypes() == {torch.float32}
    assert dtypes(dtype=torch.float16) == {torch.float16}
    changed(gpt2, torch_dtype="bfloat16")
    assert dtypes() == {torch.bfloat16}
    changed(gpt2, dtype="float64")  # the newer name
    assert dtypes() == {torch.float64}
    assert dtypes(dtype=torch.float32) == {torch.float32}
    on_meta = from_pretrained(gpt2, OFF, device="meta")
    assert {tensor.device.type for tensor in on_meta.state_dict().values()} == {"meta"}


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
        (
            "huggingface_hub",
            "openai-community/gpt2",
            "'openai-community/gpt2' is not a folder here, and its download",
        ),
        ("safetensors", "", "reading the weights of '"),
    ],
)
def test_a_missing_library(library: str, name: str, wish: str, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    text = rf"^{wish}.* needs {library}; install it with: pip install 'fuselayers\[hub\]'$"
    with pytest.raises(ImportError, match=text):
        from_pretrained(name or gpt2, OFF)


def test_names_in_older_files() -> None:
    """The files of the first releases hold more than the model uses."""
    bert = {
        re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)): tensor
        for name, tensor in small_state(build("bert_tiny", OFF), "bert").items()
    }
    bert |= {"cls.seq_relationship.bias": torch.zeros(2), "bert.embeddings.position_ids": torch.arange(64)[None]}
    llama = small_state(build("llama3_8b", [*TWINS["llama3_8b"].overrides, *OFF]), "llama")
    llama["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    t5 = small_state(build("t5_tiny", OFF), "t5")
    t5["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    vit = small_state(build("vit_tiny", OFF), "vit")
    vit["vit.pooler.dense.bias"] = torch.zeros(32)
    opt = {name.removeprefix("model."): tensor for name, tensor in small_state(build("opt_tiny", OFF), "opt").items()}
    neox = small_state(build("gpt_neox_tiny", OFF), "gpt_neox")
    neox["embed_out.weight"] = neox.pop("lm_head.weight")
    neox["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64).tril()
    neox["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    neox["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.zeros(1)
    bloom = small_state(build("bloom_tiny", OFF), "bloom")
    bloom = {name.removeprefix("transformer."): tensor for name, tensor in bloom.items() if name != "lm_head.weight"}
    older = {"bert_tiny": bert, "llama3_8b": llama, "t5_tiny": t5, "vit_tiny": vit, "opt_tiny": opt}
    older |= {"gpt_neox_tiny": neox, "bloom_tiny": bloom}
    assert any("gamma" in name for name in bert)
    for name, state in older.items():
        model = build(name, [*TWINS[name].overrides, *OFF])
        assert matched(model, state, family=TWINS[name].family).keys() == model.state_dict().keys()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt3"}, "no model_type (of config.json) 'gpt3'; did you mean 'gpt2'? there are: bert, bloom, "),
    ({"n_embd": None}, "config.json has no n_embd, which its model_type needs"),
    ({"n_layer": "${oc.env:HOME}"}, "model.num_layers"),
    (
        {"scale_attn_by_inverse_layer_idx": True},
        "has scale_attn_by_inverse_layer_idx = True; this library supports only",
    ),
    ({"activation_function": "tanh"}, "no activation (activation_function of config.json) 'tanh'; there are: gelu, "),
    (
        {"quantization_config": {"bits": 4}},
        "config.json has a quantization_config; quantized weights are not supported",
    ),
    ({"n_layer": 1}, "the state_dict does not fit this gpt2: blocks.1."),
    ({"tie_word_embeddings": False}, "the state_dict does not fit this gpt2: head.weight is missing"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG)
def test_a_config_that_cannot_be(fields: dict[str, Any], text: str, gpt2: Path) -> None:
    changed(gpt2, **fields)
    with pytest.raises(ValueError, match=re.escape(text)):
        from_pretrained(gpt2, OFF)


# The new content of files, or the part of the old one that is left; None removes a file.
@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        ({"config.json": None}, FileNotFoundError, "has no config.json, which every checkpoint has"),
        ({"config.json": "{"}, ValueError, "config.json' is not JSON: "),
        (
            {"model.safetensors": None, "pytorch_model.bin": ""},
            FileNotFoundError,
            "has neither model.safetensors nor model.safetensors.index.json; pickle fil",
        ),
        ({"model.safetensors": slice(-1)}, ValueError, "model.safetensors' is damaged: "),
        (
            {"model.safetensors.index.json": '{"weight_map": {"wte.weight": "model-00001-of-00001.safetensors"}}'},
            FileNotFoundError,
            "lacks model-00001-of-00001.safetensors, which model.safetensors.index",
        ),
    ],
)
def test_a_damaged_folder(damage: dict[str, str | slice | None], kind: type[Exception], text: str, gpt2: Path) -> None:
    for name, content in damage.items():
        if content is None:
            (gpt2 / name).unlink()
        elif isinstance(content, slice):
            (gpt2 / name).write_bytes((gpt2 / name).read_bytes()[content])
        else:
            (gpt2 / name).write_text(content)
    with pytest.raises(kind, match=re.escape(text)):
        from_pretrained(gpt2, OFF)


def test_a_model_fused_as_a_whole_takes_the_weights_too(gpt2: Path) -> None:
    tokens_BT = torch.arange(12)[None]
    plain: Any = from_pretrained(gpt2, OFF)
    fused: Any = from_pretrained(gpt2, ["fusion=eager", "fusion.scope=model"])
    assert torch.equal(fused.generate(tokens_BT, 4, temperature=0.0), plain.generate(tokens_BT, 4, temperature=0.0))


def test_what_is_neither_a_folder_nor_a_repository(tmp_path: Path) -> None:
    for wrong in (tmp_path / "gone", "./gone", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=r"^there is no folder '.*(gone|c)'; name a folder, or a reposit"):
            from_pretrained(wrong)
    with pytest.raises(ValueError, match=r"^'gpt2_small' is an architecture without weights, for fuselayers.build; na"):
        from_pretrained("gpt2_small")
