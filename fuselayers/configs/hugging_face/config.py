"""config_of -- translates the config.json of a Hugging Face checkpoint into a config of this library.

Each reader starts from a shipped model of its family, and sets every size and option that config.json decides. The
readers were compared with `transformers` 5.20 to 5.24. A test covers every field that its configs hold.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from . import bert, bloom, gemma2, gpt2, gpt_neox, llama, mixtral, opt, phi, t5, vit
from .fields import Fields, translated

# model_type -> a shipped model of the architecture, the family of the weights, and the reader.
READERS: Final[dict[str, tuple[str, str, Callable[[Fields], dict[str, Any]]]]] = {
    "gpt2": ("gpt2_small", "gpt2", gpt2.read),
    "bert": ("bert_base", "bert", bert.read),
    "llama": ("llama3_8b", "llama", llama.read),
    "mistral": ("mistral_7b", "llama", llama.read_mistral),
    "mixtral": ("mixtral_8x7b", "mixtral", mixtral.read),
    "gemma2": ("gemma2_2b", "gemma2", gemma2.read),
    "qwen2": ("qwen2_5_0_5b", "llama", llama.read_qwen2),
    "qwen3": ("qwen3_8b", "llama", llama.read_qwen3),
    "opt": ("opt_125m", "opt", opt.read),
    "gpt_neox": ("gpt_neox_20b", "gpt_neox", gpt_neox.read),
    "phi": ("phi_2", "phi", phi.read),
    "bloom": ("bloom_560m", "bloom", bloom.read),
    "vit": ("vit_b16", "vit", vit.read),
    "t5": ("t5_small", "t5", t5.read),
}


def config_of(content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the family of the weights and the config for `compose`, for the content of a config.json.

    Raises:
        ValueError: the model_type is unknown; a field is missing; or a field has a value that is not supported.
    """
    base, family, reader = translated(READERS, content.get("model_type"), called="model_type (of config.json)")
    if content.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a quantization_config; quantized weights are not supported, use the original weights"
        )
    return family, {"defaults": [{"model": base}], **reader(Fields(content))}
