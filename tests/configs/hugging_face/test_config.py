"""The config.json of checkpoints against the shipped models, and against the configs of `transformers`."""

import importlib
import re
from typing import Any

import pytest
import torch

from fuselayers.configs import build, rebuild
from fuselayers.configs.hugging_face import FAMILIES, config_of
from tests.configs.hugging_face.twins import TWINS

# Configs of the hub, with the field names of the `transformers` of their time, without fields about tokens and tasks.
ROTARY = {"hidden_act": "silu", "tie_word_embeddings": False, "num_key_value_heads": 8, "num_attention_heads": 32}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BIG = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000}
ON_THE_HUB: dict[str, dict[str, Any]] = {
    "gpt2_small": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
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
    "opt_125m": {
        "model_type": "opt",
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "attention_dropout": 0.0,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "ffn_dim": 3072,
        "hidden_size": 768,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
    },
    "pythia_160m": {
        **BASE,
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "phi_2": {
        "model_type": "phi",
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
    "bloom_560m": {
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": 1e-05,
        "n_embed": 1024,
        "n_layer": 24,
        "num_attention_heads": 16,
        "seq_length": 2048,
        "vocab_size": 250880,
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
# The shipped models deviate from the releases here, as their files say. These overrides restore the releases.
DEVIATES = {
    "gpt2_small": ["attention.dropout=0.1"],
    "t5_small": ["attention.dropout=0.1"],
    "qwen3_0_6b": ["model.context_length=40960"],
}


# The configs with field names of their own; test_from_pretrained.py reads every model_type.
@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_released_config_gives_the_shipped_model(name: str) -> None:
    _, config = config_of(ON_THE_HUB[name])
    with torch.device("meta"):
        released, shipped = build(config, ["fusion=off"]), build(name, ["fusion=off", *DEVIATES.get(name, [])])
    assert repr(released) == repr(shipped)
    scales = ([getattr(module, "scale", None) for module in model.modules()] for model in (released, shipped))
    assert next(scales) == next(scales)


# Fields that do not affect the loaded model: tokens, initial values, heads of other tasks, how transformers runs.
WITHOUT_EFFECT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "initializer_factor", "init_std"),
    *("use_cache",),
    *("classifier_dropout", "pooler_act", "pooler_output_size", "encoder_stride", "output_router_logits"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("pretraining_tp", "reorder_and_upcast_attn", "is_encoder_decoder", "is_decoder"),
    *("dense_act_fn", "is_gated_act"),  # of T5, made from feed_forward_proj
    *("max_window_layers", "sliding_window"),  # of Qwen2 and Qwen3, where use_sliding_window is off
}


@pytest.mark.parametrize("model_type", FAMILIES)
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
    # The sizes of the tests include a vocabulary, even for images.
    others = {*PretrainedConfig().to_dict(), *(("vocab_size",) if model_type == "vit" else ())}
    assert content.keys() - others - read - WITHOUT_EFFECT == set()


LLAMA_JSON = {"model_type": "llama", **ROTARY, **BIG, "max_position_embeddings": 64}


# One case for each kind of check: the test above finds a field that no reader checks.
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"attention_bias": True}, "config.json has attention_bias = True; this library supports only False"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "no kind of rotary positions (rope_type of config.json) 'd",
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters of config.json must be one mapping for all layer",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "truncate": False, "factor": 2}},
            "config.json has truncate = False",
        ),
        ({"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": "x"}, "must be a number, got 'x'"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": -1},
            "router_aux_loss_coef of config.",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types of config.json must be full_attentio",
        ),
        (
            {"model_type": "opt", "word_embed_proj_dim": 512},
            "word_embed_proj_dim = 512; this library supports only 4096",
        ),
        (
            {"model_type": "opt", "ffn_dim": 8, "do_layer_norm_before": 1},
            "do_layer_norm_before of config.json must be true or false, got 1",
        ),
        ({"model_type": "bloom", "num_hidden_layers": None}, "config.json has no n_layer, which its model_type needs"),
        ({"model_type": "gpt2", "n_embd": "32"}, "n_embd of config.json must be a whole number, got '32'"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar of config.json must be above 0"),
        ({"model_type": "vit", "image_size": [4, 8]}, "image_size of config.json must be square, got [4, 8]"),
        ({"model_type": "vit", "id2label": 3}, "id2label of config.json must name the classes, got 3"),
        ({"model_type": "t5", "d_model": 8, "feed_forward_proj": "a-relu"}, "must be relu or gated-gelu, got a-relu"),
    ],
)
def test_a_field_that_asks_for_something_else(content: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        config_of({**LLAMA_JSON, **content})


def test_square_images_and_small_scalars_are_read() -> None:
    _, vit = config_of({**LLAMA_JSON, "model_type": "vit", "image_size": [12, 12], "patch_size": [4, 4]})
    assert (vit["model"]["image_size"], vit["model"]["patch_size"]) == (12, 4)
    _, gemma = config_of({**LLAMA_JSON, "model_type": "gemma2", "query_pre_attn_scalar": 0.25})
    assert gemma["attention"]["scale"] == 2.0


@pytest.mark.parametrize("model_type", ["bert", "opt", "gpt_neox"])
def test_a_family_without_grouped_heads_does_not_read_them(model_type: str) -> None:
    content = {**BASE, "model_type": model_type, "vocab_size": 8, "ffn_dim": 8}
    _, config = config_of({**content, "num_key_value_heads": 4, "head_dim": 32})
    assert config == config_of(content)[1]
    with torch.device("meta"):
        model = build(config, ["fusion=off", "model.num_layers=1"])
    rebuild(model, ["attention.num_heads=6"], strict=True)
