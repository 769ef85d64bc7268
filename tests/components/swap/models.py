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


def _deit() -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if not name.endswith(("_id", "vocab_size"))}
    config = transformers.DeiTConfig(image_size=16, patch_size=8, hidden_dropout_prob=0.1, **sizes)
    model: nn.Module = transformers.DeiTForImageClassification(config)
    return model


def _swin() -> nn.Module:
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    model: nn.Module = transformers.SwinForImageClassification(
        transformers.SwinConfig(image_size=32, patch_size=4, **sizes)
    )
    return model


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)


_LLAMA: Final = {"causal_lm_loss": 1, "gated_mlp": 2, "rms_norm": 5}
_BERT: Final = {"attention_dropout": 2, "dense_dropout_residual_norm": 4, "dropout": 7}
_BLOOM: Final = {"attention_dropout": 2, "dropout": 2}
_NEOX: Final = {"causal_lm_loss": 1, "dropout": 5, "mlp": 2}

FAMILIES: Final[dict[str, tuple[Callable[[], nn.Module], dict[str, int]]]] = {
    "gpt2": (_gpt2, {"attention_dropout": 2, "causal_lm_loss": 1, "dropout": 7, "gelu_tanh": 2, "mlp": 2}),
    "llama": (lambda: _decoder("Llama"), _LLAMA),
    "mistral": (lambda: _decoder("Mistral"), _LLAMA),
    "mixtral": (lambda: _decoder("Mixtral", num_local_experts=2), {"rms_norm": 5}),
    "qwen3": (lambda: _decoder("Qwen3"), {"causal_lm_loss": 1, "gated_mlp": 2, "rms_norm": 9}),
    "gemma": (lambda: _decoder("Gemma"), {"causal_lm_loss": 1, "gated_mlp": 2, "rms_norm_from_one": 5}),
    "gemma2": (lambda: _decoder("Gemma2"), {"gated_mlp": 2, "rms_norm_from_one": 9}),
    "olmo2": (lambda: _decoder("Olmo2"), {"causal_lm_loss": 1, "gated_mlp": 2, "rms_norm": 9}),
    "phi3": (lambda: _decoder("Phi3"), {"causal_lm_loss": 1, "dropout": 4, "packed_gated_mlp": 2, "rms_norm": 5}),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES)), _BERT),
    "roberta": (lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_SIZES)), _BERT),
    "distilbert": (_distilbert, {"attention_dropout": 2, "dropout": 5}),
    "bart": (_bart, {}),
    "t5": (_t5, {"attention_dropout": 6, "dropout": 16, "gated_mlp": 4, "gelu_tanh": 4, "wide_rms_norm": 12}),
    "mbart": (lambda: _bart("MBart"), {}),
    "opt": (_opt, {"causal_lm_loss": 1}),
    "bloom": (_bloom, _BLOOM),
    "falcon": (_falcon, {"attention_dropout": 2, "dropout": 2, "mlp": 2}),
    "gpt_neox": (lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_SIZES)), _NEOX),
    "phi": (
        lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**_SIZES)),
        {"causal_lm_loss": 1, "dropout": 3, "gelu_tanh": 2, "mlp": 2},
    ),
    "cohere": (lambda: _decoder("Cohere"), {"gated_mlp": 2}),
    "stablelm": (
        lambda: transformers.StableLmForCausalLM(transformers.StableLmConfig(**_SIZES, num_key_value_heads=2)),
        {"causal_lm_loss": 1, "dropout": 2, "gated_mlp": 2},
    ),
    "starcoder2": (
        lambda: transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**_SIZES, num_key_value_heads=2)),
        {"causal_lm_loss": 1},
    ),
    "deberta-v2": (_deberta, {"attention_dropout": 2, "dense_dropout_residual_norm": 4, "dropout": 9}),
    "electra": (
        lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(**_SIZES, embedding_size=16)),
        _BERT,
    ),
    "whisper": (_whisper, {}),
    "wav2vec2": (_wav2vec2, {"attention_dropout": 2, "dropout": 8, "mlp": 2}),
    "siglip": (lambda: _vision("SiglipVision"), {"mlp": 3}),
    "dinov2": (lambda: _vision("Dinov2"), {"dropout": 1, "mlp": 2}),
    "vit": (_vit, {"dropout": 3, "mlp": 2}),
    "deit": (_deit, {"dropout": 3, "mlp": 2}),
    "swin": (_swin, {"dropout": 9}),
    "clip": (lambda: _vision("CLIPVision"), {"mlp": 2}),
    "torch encoder": (_torch_encoder, {"dropout": 6}),
}
"""Each family: its model, and how often each rule fits at level "layers"."""


def batch_for(name: str, tokens: int = 12) -> dict[str, torch.Tensor]:
    """A batch for a model of FAMILIES."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "deit", "swin", "clip", "siglip", "dinov2"):
        size = 32 if name == "swin" else 16
        images = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": images} | ({"labels": torch.tensor([0, 1])} if name in ("vit", "deit", "swin") else {})
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
