"""Small models of other libraries, with random weights, and batches for them."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

_SIZES: Final = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(name: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, "num_key_value_heads": 2, "head_dim": 8, **more})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _bart(name: str = "Bart") -> nn.Module:
    sides = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=99, d_model=32, max_position_embeddings=64, **sides, **heads
    )
    model: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def _distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    model: nn.Module = transformers.DistilBertForMaskedLM(config)
    return model


def _opt(**more: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    config = transformers.OPTConfig(vocab_size=99, word_embed_proj_dim=32, **sizes, **more)
    model: nn.Module = transformers.OPTForCausalLM(config)
    return model


def _bloom(**more: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
    config = transformers.BloomConfig(vocab_size=99, hidden_dropout=0.1, attention_dropout=0.1, **sizes, **more)
    model: nn.Module = transformers.BloomForCausalLM(config)
    return model


def _falcon(**more: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(vocab_size=99, hidden_dropout=0.1, **sizes, **more)
    model: nn.Module = transformers.FalconForCausalLM(config)
    return model


def _gptj() -> nn.Module:
    config = transformers.GPTJConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    model: nn.Module = transformers.GPTJForCausalLM(config)
    return model


def _deberta() -> nn.Module:
    config = transformers.DebertaV2Config(
        **_SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16
    )
    model: nn.Module = transformers.DebertaV2ForMaskedLM(config)
    return model


def _whisper() -> nn.Module:
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("ffn_dim", 64), ("attention_heads", 4))
    }
    tokens = {name: value for name, value in _SIZES.items() if name.endswith("_id")}
    config = transformers.WhisperConfig(
        vocab_size=99,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        **sides,
        **tokens,
    )
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    return model


def _wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    config = transformers.Wav2Vec2Config(mask_time_prob=0.0, layerdrop=0.0, **convolutions, **positions, **_SIZES)
    model: nn.Module = transformers.Wav2Vec2Model(config)
    return model


def _vision(name: str, **more: Any) -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if not name.endswith(("_id", "vocab_size"))}
    config = getattr(transformers, f"{name}Config")(image_size=16, patch_size=8, **{**sizes, **more})
    model: nn.Module = getattr(transformers, f"{name}Model")(config)
    return model


def _vit() -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if not name.endswith(("_id", "vocab_size"))}
    config = transformers.ViTConfig(image_size=16, patch_size=8, hidden_dropout_prob=0.1, **sizes)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)


_LLAMA: Final = frozenset({"residual_rms_norm", "gated_mlp", "rms_norm", "causal_lm_loss"})
_GEMMA: Final = frozenset({"gated_mlp", "rms_norm_from_one"})
_BERT: Final = frozenset({"mlp", "dropout_residual_norm", "residual_norm", "attention_dropout", "dropout"})

FAMILIES: Final[dict[str, tuple[Callable[[], nn.Module], frozenset[str]]]] = {
    "gpt2": (
        _gpt2,
        frozenset(
            {
                *("mlp", "gelu_tanh", "dropout_residual", "dropout"),
                *("attention_dropout", "causal_lm_loss"),
            }
        ),
    ),
    "llama": (lambda: _decoder("Llama"), _LLAMA),
    "mistral": (lambda: _decoder("Mistral"), _LLAMA),
    "mixtral": (
        lambda: _decoder("Mixtral", num_local_experts=2),
        frozenset({"residual_rms_norm", "rms_norm", "causal_lm_loss"}),
    ),
    "qwen3": (lambda: _decoder("Qwen3"), _LLAMA),
    "gemma": (lambda: _decoder("Gemma"), _GEMMA | {"causal_lm_loss"}),
    "gemma2": (lambda: _decoder("Gemma2"), _GEMMA),
    "olmo2": (lambda: _decoder("Olmo2"), frozenset({"gated_mlp", "rms_norm", "causal_lm_loss"})),
    "phi3": (
        lambda: _decoder("Phi3"),
        frozenset(
            {
                *("packed_gated_mlp", "rms_norm", "residual_rms_norm"),
                *("dropout_residual", "dropout", "causal_lm_loss"),
            }
        ),
    ),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES)), _BERT),
    "roberta": (lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_SIZES)), _BERT),
    "distilbert": (
        _distilbert,
        frozenset({"mlp", "dropout_residual_norm", "residual_norm", "attention_dropout", "dropout"}),
    ),
    "bart": (_bart, frozenset({"mlp", "dropout_residual_norm", "residual_norm", "dropout"})),
    "t5": (
        _t5,
        frozenset(
            {
                *("gated_mlp", "wide_rms_norm", "gelu_tanh"),
                *("dropout_residual", "dropout", "attention_dropout"),
            }
        ),
    ),
    "mbart": (
        lambda: _bart("MBart"),
        frozenset({"mlp", "dropout_residual_norm", "residual_norm", "dropout_residual", "dropout"}),
    ),
    "opt": (_opt, frozenset({"mlp", "dropout_residual", "causal_lm_loss"})),
    "bloom": (_bloom, frozenset({"mlp", "dropout_residual", "dropout", "causal_lm_loss"})),
    "falcon": (_falcon, frozenset({"mlp", "dropout_residual", "dropout", "causal_lm_loss"})),
    "gpt_neox": (
        lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_SIZES)),
        frozenset({"mlp", "dropout_residual", "dropout", "causal_lm_loss"}),
    ),
    "gptj": (_gptj, frozenset({"mlp", "gelu_tanh", "dropout_residual", "dropout", "causal_lm_loss"})),
    "phi": (
        lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**_SIZES)),
        frozenset({"mlp", "gelu_tanh", "dropout", "causal_lm_loss"}),
    ),
    "cohere": (lambda: _decoder("Cohere"), frozenset({"gated_mlp"})),
    "stablelm": (
        lambda: transformers.StableLmForCausalLM(transformers.StableLmConfig(**_SIZES, num_key_value_heads=2)),
        frozenset({"residual_norm", "gated_mlp", "dropout_residual", "dropout", "causal_lm_loss"}),
    ),
    "starcoder2": (
        lambda: transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**_SIZES, num_key_value_heads=2)),
        frozenset({"residual_norm", "mlp", "dropout_residual", "dropout", "causal_lm_loss"}),
    ),
    "deberta-v2": (
        _deberta,
        frozenset({"mlp", "dropout_residual_norm", "residual_norm", "dropout"}),
    ),
    "electra": (
        lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(**_SIZES, embedding_size=16)),
        _BERT,
    ),
    "whisper": (_whisper, frozenset({"mlp", "dropout_residual_norm", "dropout_residual", "dropout"})),
    "wav2vec2": (
        _wav2vec2,
        _BERT,
    ),
    "siglip": (lambda: _vision("SiglipVision"), frozenset({"residual_norm", "mlp"})),
    "dinov2": (lambda: _vision("Dinov2"), frozenset({"residual_norm", "mlp", "dropout"})),
    "vit": (_vit, frozenset({"dropout_residual_norm", "mlp", "dropout_residual", "dropout"})),
    "clip": (lambda: _vision("CLIPVision"), frozenset({"residual_norm", "mlp"})),
    "torch encoder": (
        _torch_encoder,
        frozenset({"mlp", "dropout_residual_norm", "dropout_residual", "dropout"}),
    ),
}
"""Each family: its model, and the rules that `swap` finds in it at level "layers"."""


VARIANTS: Final[dict[str, tuple[Callable[[], nn.Module], frozenset[str]]]] = {
    "opt, norm last": (
        lambda: _opt(do_layer_norm_before=False),
        frozenset({"mlp", "dropout_residual_norm", "dropout_residual", "causal_lm_loss"}),
    ),
    "bloom in slices": (
        lambda: _bloom(slow_but_exact=True, pretraining_tp=2),
        frozenset({"dropout_residual", "dropout", "causal_lm_loss"}),
    ),
    "falcon, one after the other": (
        lambda: _falcon(parallel_attn=False, multi_query=False, bias=True, alibi=True),
        frozenset({"dropout_residual_norm", "mlp", "dropout_residual", "dropout", "causal_lm_loss"}),
    ),
    "falcon, two norms": (
        lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2, bias=True),
        frozenset({"mlp", "dropout_residual", "dropout", "causal_lm_loss"}),
    ),
    "gpt_neox, one after the other": (
        lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(use_parallel_residual=False, **_SIZES)),
        frozenset({"dropout_residual_norm", "mlp", "dropout_residual", "dropout", "causal_lm_loss"}),
    ),
}
"""The same for other branches of some families."""


def batch_for(name: str, tokens: int = 12) -> dict[str, torch.Tensor]:
    """A batch for a model of FAMILIES."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "clip", "siglip", "dinov2"):
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": images} | ({"labels": torch.tensor([0, 1])} if name == "vit" else {})
    if name == "torch encoder":
        return {"src": torch.randn(2, tokens, 32, generator=generator)}
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 400, generator=generator)}
    ids = torch.randint(3, 99, (2, tokens), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's loss, or the mean square of its result."""
    result: Any = model(**batch)
    loss: torch.Tensor | None = getattr(result, "loss", None)
    if loss is None:
        loss = getattr(result, "last_hidden_state", result).square().mean()
    return loss
