"""Small models of other libraries, with random weights, and batches for them."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

_TOKENS: Final = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS: Final = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS: Final = {**_LAYERS, "intermediate_size": 64, **_TOKENS}
IMAGES: Final = {**_LAYERS, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
_SIDES: Final = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("ffn_dim", 64), ("attention_heads", 4))
}
_BART: Final = {"vocab_size": 99, "d_model": 32, "max_position_embeddings": 64, **_SIDES}
_T5: Final = {
    **{"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
}
_WHISPER: Final = {
    **{"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    **{"decoder_start_token_id": 1, **_SIDES, **_TOKENS},
}
_WAV2VEC2: Final = {
    **{"mask_time_prob": 0.0, "layerdrop": 0.0, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, **TEXTS},
}
_SWIN: Final = {
    **{"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
}
_BLOOM: Final = {
    **{"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
}
_DEBERTA: Final = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16, **TEXTS}


_SCALED: Final = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "n_embd", "d_model", "d_kv", "d_ff", "ffn_dim"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim", "embed_dim", "image_size"),
        *("max_source_positions", "max_target_positions"),
    }
)


def _model(family: str, head: str, **config: Any) -> Callable[..., nn.Module]:
    def make(scale: int = 1) -> nn.Module:
        sizes = {name: value * scale if name in _SCALED else value for name, value in config.items()}
        return getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**sizes))

    return make


def _decoder(family: str, **more: Any) -> Callable[..., nn.Module]:
    return _model(family, "ForCausalLM", **{**TEXTS, "num_key_value_heads": 2, "head_dim": 8, **more})


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)


_OF_LLAMA: Final = {"attention": 2, "causal_lm_loss": 1, "gated_mlp": 2, "rms_norm": 5}
_OF_QWEN3: Final = {"attention": 2, "causal_lm_loss": 1, "gated_mlp": 2, "rms_norm": 9}
_OF_ROBERTA: Final = {"attention": 2, "dense_dropout_residual_norm": 4, "dropout": 7}
_OF_BERT: Final = {**_OF_ROBERTA, "dense_activation_norm": 1}
_OF_VIT: Final = {"attention": 2, "dropout": 3, "mlp": 2}
_OF_SWIN: Final = (
    # Older versions have no SwinMLP.
    {"attention": 4, "dropout": 5, "mlp": 4}
    if hasattr(transformers.models.swin.modeling_swin, "SwinMLP")
    else {"attention": 4, "dropout": 9}
)

FAMILIES: Final[dict[str, tuple[Callable[..., nn.Module], dict[str, int]]]] = {
    "gpt2": (
        _model("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, **_TOKENS),
        {"attention": 2, "causal_lm_loss": 1, "dropout": 7, "gelu_tanh": 2, "mlp": 2},
    ),
    "llama": (_decoder("Llama"), _OF_LLAMA),
    "mistral": (_decoder("Mistral"), _OF_LLAMA),
    "mixtral": (_decoder("Mixtral", num_local_experts=2), {"attention": 2, "rms_norm": 5}),
    "qwen3": (_decoder("Qwen3"), _OF_QWEN3),
    "gemma": (_decoder("Gemma"), {"attention": 2, "causal_lm_loss": 1, "gated_mlp": 2, "rms_norm_from_one": 5}),
    "gemma2": (_decoder("Gemma2"), {"attention": 2, "gated_mlp": 2, "rms_norm_from_one": 9}),
    "olmo2": (_decoder("Olmo2"), _OF_QWEN3),
    "phi3": (
        _decoder("Phi3"),
        {"attention": 2, "causal_lm_loss": 1, "dropout": 4, "packed_gated_mlp": 2, "rms_norm": 5},
    ),
    "bert": (_model("Bert", "ForMaskedLM", **TEXTS), _OF_BERT),
    "roberta": (_model("Roberta", "ForMaskedLM", **TEXTS), _OF_ROBERTA),
    "electra": (_model("Electra", "ForMaskedLM", **TEXTS, embedding_size=16), _OF_BERT),
    "deberta-v2": (
        _model("DebertaV2", "ForMaskedLM", **_DEBERTA),
        {**_OF_BERT, "dropout": 9},
    ),
    "distilbert": (
        _model("DistilBert", "ForMaskedLM", vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
        {"attention": 2, "dropout": 5},
    ),
    "bart": (_model("Bart", "ForConditionalGeneration", **_BART), {"attention": 6}),
    "mbart": (_model("MBart", "ForConditionalGeneration", **_BART), {"attention": 6}),
    "t5": (
        _model("T5", "ForConditionalGeneration", **_T5),
        {"attention": 6, "dropout": 16, "gated_mlp": 4, "gelu_tanh": 4, "wide_rms_norm": 12},
    ),
    "opt": (
        _model("OPT", "ForCausalLM", **_LAYERS, ffn_dim=64, word_embed_proj_dim=32, vocab_size=99),
        {"attention": 2, "causal_lm_loss": 1},
    ),
    "bloom": (
        _model("Bloom", "ForCausalLM", **_BLOOM),
        {"attention": 2, "dropout": 2},
    ),
    "falcon": (
        _model("Falcon", "ForCausalLM", vocab_size=99, hidden_dropout=0.1, **_LAYERS),
        {"attention": 2, "dropout": 2, "mlp": 2},
    ),
    "gpt_neox": (
        _model("GPTNeoX", "ForCausalLM", **TEXTS),
        {"attention": 2, "causal_lm_loss": 1, "dropout": 5, "mlp": 2},
    ),
    "phi": (
        _model("Phi", "ForCausalLM", **TEXTS),
        {"attention": 2, "causal_lm_loss": 1, "dropout": 3, "gelu_tanh": 2, "mlp": 2},
    ),
    "cohere": (_decoder("Cohere"), {"attention": 2, "gated_mlp": 2}),
    "stablelm": (
        _model("StableLm", "ForCausalLM", **TEXTS, num_key_value_heads=2),
        {"attention": 2, "causal_lm_loss": 1, "dropout": 2, "gated_mlp": 2},
    ),
    "starcoder2": (
        _model("Starcoder2", "ForCausalLM", **TEXTS, num_key_value_heads=2),
        {"attention": 2, "causal_lm_loss": 1},
    ),
    "whisper": (_model("Whisper", "ForConditionalGeneration", **_WHISPER), {"attention": 6}),
    "wav2vec2": (_model("Wav2Vec2", "Model", **_WAV2VEC2), {"attention": 2, "dropout": 8, "mlp": 2}),
    "siglip": (_model("SiglipVision", "Model", **IMAGES), {"attention": 2, "mlp": 3}),
    "dinov2": (_model("Dinov2", "Model", **IMAGES), {"attention": 2, "dropout": 1, "mlp": 2}),
    "clip": (_model("CLIPVision", "Model", **IMAGES), {"attention": 2, "mlp": 2}),
    "vit": (_model("ViT", "ForImageClassification", hidden_dropout_prob=0.1, **IMAGES), _OF_VIT),
    "deit": (_model("DeiT", "ForImageClassification", hidden_dropout_prob=0.1, **IMAGES), _OF_VIT),
    "swin": (_model("Swin", "ForImageClassification", **_SWIN), _OF_SWIN),
    "torch encoder": (_torch_encoder, {"dropout": 6}),
}
"""Each family: its model, and how often each rule fits at level "layers"."""


def batch_for(name: str, tokens: int = 12, scale: int = 1) -> dict[str, torch.Tensor]:
    """A batch for a model of FAMILIES. `scale` is the scale of a wider model; texts are longer and images larger."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "deit", "swin", "clip", "siglip", "dinov2"):
        size = (32 if name == "swin" else 16) * scale
        images = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": images} | ({"labels": torch.tensor([0, 1])} if name in ("vit", "deit", "swin") else {})
    if name == "torch encoder":
        return {"src": torch.randn(2, tokens, 32, generator=generator)}
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 400, generator=generator)}
    ids = torch.randint(3, 99, (2, tokens * scale), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32 * scale, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's loss, or the mean square of its result."""
    result: Any = model(**batch)
    loss: torch.Tensor | None = getattr(result, "loss", None)
    if loss is None:
        loss = getattr(result, "last_hidden_state", result).square().mean()
    return loss
