"""FAMILIES, config_of -- the architectures of `transformers` that fit models here, and the configs of config.json.

Each reader starts from a shipped model of its family, and sets every size and option that config.json decides. The
readers were compared with `transformers` 5.20 to 5.24. A test covers every field that its configs hold.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from . import bert, bloom, gemma2, gpt2, gpt_neox, llama, mixtral, opt, phi, t5, vit
from .family import Family
from .fields import Fields, translated


class Architecture(NamedTuple):
    """A shipped model, the names of the weights, and the reader of config.json."""

    model: str
    weights: Family
    read: Callable[[Fields], dict[str, Any]]


# By the model_type of config.json.
FAMILIES: Final = {
    "gpt2": Architecture("gpt2_small", gpt2.FAMILY, gpt2.read),
    "bert": Architecture("bert_base", bert.FAMILY, bert.read),
    "llama": Architecture("llama3_8b", llama.FAMILY, llama.read),
    "mistral": Architecture("mistral_7b", llama.FAMILY, llama.read_mistral),
    "mixtral": Architecture("mixtral_8x7b", mixtral.FAMILY, mixtral.read),
    "gemma2": Architecture("gemma2_2b", gemma2.FAMILY, gemma2.read),
    "qwen2": Architecture("qwen2_5_0_5b", llama.FAMILY, llama.read_qwen2),
    "qwen3": Architecture("qwen3_8b", llama.FAMILY, llama.read_qwen3),
    "opt": Architecture("opt_125m", opt.FAMILY, opt.read),
    "gpt_neox": Architecture("gpt_neox_20b", gpt_neox.FAMILY, gpt_neox.read),
    "phi": Architecture("phi_2", phi.FAMILY, phi.read),
    "bloom": Architecture("bloom_560m", bloom.FAMILY, bloom.read),
    "vit": Architecture("vit_b16", vit.FAMILY, vit.read),
    "t5": Architecture("t5_small", t5.FAMILY, t5.read),
}


def config_of(content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the family of the weights and the config for `compose`, for the content of a config.json.

    Raises:
        ValueError: the model_type is unknown; a field is missing; or a field has a value that is not supported.
    """
    family: Any = content.get("model_type")
    architecture = translated(FAMILIES, family, called="model_type (of config.json)")
    if content.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a quantization_config; quantized weights are not supported, use the original weights"
        )
    return family, {"defaults": [{"model": architecture.model}], **architecture.read(Fields(content))}
