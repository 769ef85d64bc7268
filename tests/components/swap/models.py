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


def _bart() -> nn.Module:
    sides = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model: nn.Module = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=99, d_model=32, max_position_embeddings=64, **sides, **heads)
    )
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


def _opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32
    )
    model: nn.Module = transformers.OPTForCausalLM(config)
    return model


def _vit() -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if not name.endswith(("_id", "vocab_size"))}
    config = transformers.ViTConfig(image_size=16, patch_size=8, hidden_dropout_prob=0.1, **sizes)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def _clip() -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if not name.endswith(("_id", "vocab_size"))}
    model: nn.Module = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=16, patch_size=8, **sizes))
    return model


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)


_LLAMA: Final = frozenset({"rms_norm_gated_mlp", "gated_mlp", "rms_norm", "causal_lm_loss"})
_GEMMA: Final = frozenset({"rms_norm_from_one_gated_mlp", "gated_mlp", "rms_norm_from_one"})
_BERT: Final = frozenset(
    {
        *("mlp_dropout_residual_norm", "linear_dropout_residual_norm", "residual_norm", "mlp"),
        *("attention_dropout", "dropout"),
    }
)

FAMILIES: Final[dict[str, tuple[Callable[[], nn.Module], frozenset[str]]]] = {
    "gpt2": (
        _gpt2,
        frozenset(
            {
                *("layer_norm_mlp", "mlp", "gelu_tanh", "dropout_residual"),
                *("dropout", "attention_dropout", "causal_lm_loss"),
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
                *("rms_norm_packed_gated_mlp", "packed_gated_mlp", "rms_norm"),
                *("dropout_residual", "dropout", "causal_lm_loss"),
            }
        ),
    ),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES)), _BERT),
    "roberta": (lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_SIZES)), _BERT),
    "distilbert": (
        _distilbert,
        frozenset({"mlp_dropout_residual_norm", "mlp", "residual_norm", "attention_dropout", "dropout"}),
    ),
    "bart": (_bart, frozenset({"mlp", "dropout_residual_norm", "residual_norm", "dropout"})),
    "t5": (
        _t5,
        frozenset(
            {
                *("wide_rms_norm_gated_mlp", "gated_mlp", "wide_rms_norm"),
                *("dropout_residual", "dropout", "attention_dropout"),
            }
        ),
    ),
    "opt": (_opt, frozenset({"mlp", "dropout_residual"})),
    "vit": (_vit, frozenset({"layer_norm_mlp", "mlp", "dropout_residual", "dropout"})),
    "clip": (_clip, frozenset({"layer_norm_mlp", "mlp"})),
    "torch encoder": (
        _torch_encoder,
        frozenset({"layer_norm_mlp", "mlp", "dropout_residual_norm", "dropout_residual", "dropout"}),
    ),
}
"""Each family: its model, and the rules that `swap` finds in it at level "layers"."""


def batch_for(name: str, tokens: int = 12) -> dict[str, torch.Tensor]:
    """A batch for a model of FAMILIES."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "clip"):
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": images} | ({"labels": torch.tensor([0, 1])} if name == "vit" else {})
    if name == "torch encoder":
        return {"src": torch.randn(2, tokens, 32, generator=generator)}
    ids = torch.randint(3, 99, (2, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's loss, or the mean square of its result."""
    result: Any = model(**batch)
    loss: torch.Tensor | None = getattr(result, "loss", None)
    if loss is None:
        loss = getattr(result, "last_hidden_state", result).square().mean()
    return loss
