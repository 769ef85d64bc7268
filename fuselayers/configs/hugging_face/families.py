"""FAMILIES -- the architectures of `transformers` that fit models here."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from . import bert, bloom, gemma2, gpt2, gpt_neox, llama, mixtral, opt, phi, t5, vit
from .family import Family
from .fields import Fields


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
