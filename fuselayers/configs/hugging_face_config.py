"""The config.json of a Hugging Face checkpoint as a config of ours.

Each reader starts from a shipped model of its family, and sets every size and option that config.json decides. A field
that may be missing has the default of `transformers`. A field that asks for what the library does not have is an error:
a model that differs in one option would load, and compute something else. The readers were compared with
`transformers` 5.20; a test asks for every field that its configs hold.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..names import no_such, shown

_REQUIRED: Final = object()
_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
# Kind of rotary positions -> their options and ours.
_SCALINGS: Final[dict[str, dict[str, str]]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}


class Fields:
    """The fields of a config.json, each read through a check."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field. One that may be missing has a default, which null stands for too."""
        value = self._content.get(name)
        if value is None and default is _REQUIRED:
            raise ValueError(f"config.json has no {name}, which its model_type needs")
        return default if value is None else value

    def size(self, name: str) -> int:
        """Return a whole number, to compute with."""
        value = self.get(name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} of config.json must be a whole number from 1 on, got {shown(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number, to compute with."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not value >= 0:
            raise ValueError(f"{name} of config.json must be a number from 0 on, got {shown(value)}")
        return float(value)

    def optional(self, name: str, default: Any = None) -> Any:
        """Return a field for which null has a meaning of its own."""
        return self._content.get(name, default)

    def require(self, name: str, value: Any) -> None:
        """Check a field of which only this value, the default, can be built here."""
        found = self.get(name, value)
        if found != value:
            raise ValueError(f"config.json has {name} = {shown(found)}; this library has only {shown(value)}")

    def activation(self, name: str, default: str) -> str:
        """Return the activation under our name."""
        theirs = self.get(name, default)
        return str(_translated(_ACTIVATIONS, theirs, called=f"activation ({name} of config.json)"))


def _translated(table: Mapping[str, Any], name: Any, *, called: str) -> Any:
    # Any value of JSON may stand there, also one that is no key.
    if name not in list(table):
        raise ValueError(no_such(called, name, table))
    return table[name]


def config_of(content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the family of the weights and the config of the model, as `compose` takes it, that a config.json means.

    Raises:
        ValueError: an unknown model_type; or a field is missing, or asks for what this library does not have.
    """
    base, family, reader = _translated(READERS, content.get("model_type"), called="model_type (of config.json)")
    if content.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a quantization_config; quantized weights are not read, take the original ones"
        )
    return family, {"defaults": [{"model": base}], **reader(Fields(content))}


def _gpt2(fields: Fields) -> dict[str, Any]:
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    dropout, embedding_dropout = (fields.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop"))
    if dropout != embedding_dropout:
        raise ValueError(
            f"resid_pdrop and embd_pdrop of config.json must be equal, got {shown(dropout)} and "
            f"{shown(embedding_dropout)}; this library drops from the embeddings as from the sublayers"
        )
    hidden_dim = fields.size("n_embd")
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": hidden_dim,
            "num_layers": fields.get("n_layer"),
            "context_length": fields.get("n_positions", 1024),
            "dropout": dropout,
            "tie_embeddings": fields.get("tie_word_embeddings", True),
        },
        "attention": {"num_heads": fields.get("n_head"), "dropout": fields.get("attn_pdrop", 0.1)},
        "feedforward": {
            "width": fields.get("n_inner", 4 * hidden_dim),
            "activation": fields.activation("activation_function", "gelu_new"),
        },
        "norm": {"eps": fields.get("layer_norm_epsilon", 1e-5)},
    }


def _bert(fields: Fields) -> dict[str, Any]:
    fields.require("position_embedding_type", "absolute")
    fields.require("is_decoder", False)
    fields.require("add_cross_attention", False)
    fields.require("hidden_act", "gelu")  # of the head too, which has no option for it
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.get("num_hidden_layers"),
            "context_length": fields.get("max_position_embeddings", 512),
            "num_segments": fields.get("type_vocab_size", 2),
            "dropout": fields.get("hidden_dropout_prob", 0.1),
            "tie_embeddings": fields.get("tie_word_embeddings", True),
        },
        "attention": {
            "num_heads": fields.get("num_attention_heads"),
            "dropout": fields.get("attention_probs_dropout_prob", 0.1),
        },
        "feedforward": {"width": fields.get("intermediate_size")},
        "norm": {"eps": fields.get("layer_norm_eps", 1e-12)},
    }


def _llama_like(fields: Fields, *, base: float = 10000.0, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    """What Llama and its descendants share."""
    num_heads = fields.get("num_attention_heads")
    context_length = fields.get("max_position_embeddings")
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.size("num_hidden_layers"),
            "context_length": context_length,
            "tie_embeddings": fields.get("tie_word_embeddings", tied),
        },
        "attention": {
            "num_heads": num_heads,
            "num_kv_heads": fields.get("num_key_value_heads", num_heads),
            "head_dim": fields.optional("head_dim"),
            "dropout": fields.get("attention_dropout", 0.0),
        },
        "feedforward": {"width": fields.get("intermediate_size")},
        "norm": {"eps": fields.get("rms_norm_eps", eps)},
        "position": _rotary(fields, base=base, context_length=context_length),
    }


def _rotary(fields: Fields, *, base: float, context_length: int) -> dict[str, Any]:
    # Older files hold rope_theta and rope_scaling.
    asked: dict[str, Any] = {"rope_theta": fields.get("rope_theta", base)}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.get(name, {})
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise ValueError(f"{name} of config.json must be one mapping for all layers, got {shown(part)}")
        asked |= {key: value for key, value in part.items() if value is not None}
    older_name = asked.pop("type", "default")
    kind = asked.pop("rope_type", older_name)
    names = _translated(_SCALINGS, kind, called="kind of rotary positions (rope_type of config.json)")
    options: dict[str, Any] = {"base": asked.pop("rope_theta"), "scaling": "none" if kind == "default" else kind}
    if kind == "yarn":
        asked.setdefault("original_max_position_embeddings", context_length)
    for name, value in asked.items():
        # These change nothing at these values.
        if (name, value) in (("partial_rotary_factor", 1.0), ("truncate", True)):
            continue
        if name not in names:
            raise ValueError(
                f"config.json has {name} = {shown(value)} for rotary positions, which this library lacks for {kind!r}"
            )
        options[names[name]] = value
    return options


def _llama(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    config = _llama_like(fields)
    config["feedforward"]["activation"] = fields.activation("hidden_act", "silu")
    return config


def _mistral(fields: Fields) -> dict[str, Any]:
    fields.require("layer_types", None)
    config = _llama_like(fields)
    config["feedforward"]["activation"] = fields.activation("hidden_act", "silu")
    config["attention"]["window"] = fields.optional("sliding_window", 4096)
    return config


def _mixtral(fields: Fields) -> dict[str, Any]:
    fields.require("router_jitter_noise", 0.0)
    config = _llama_like(fields, base=1000000.0, eps=1e-5)
    config["attention"]["window"] = fields.optional("sliding_window")
    config["feedforward"] = {
        "num_experts": fields.get("num_local_experts"),
        "top_k": fields.get("num_experts_per_tok", 2),
        # Theirs is of the mean over the layers; here the layers' losses are added.
        "balance_coefficient": fields.number("router_aux_loss_coef", 0.001) / config["model"]["num_layers"],
        "expert": {"width": fields.get("intermediate_size"), "activation": fields.activation("hidden_act", "silu")},
    }
    return config


def _gemma2(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    fields.require("use_bidirectional_attention", False)
    config = _llama_like(fields, tied=True)
    num_layers, window = config["model"]["num_layers"], fields.optional("sliding_window", 4096)
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    kinds = fields.get("layer_types", alternating)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not {"full_attention", "sliding_attention"}.issuperset(kinds)
    ):
        raise ValueError(
            "layer_types of config.json must be full_attention or sliding_attention for each of the "
            f"{num_layers} layers, got {shown(kinds)}"
        )
    windowed = ["::2"] if kinds == alternating else [str(at) for at, kind in enumerate(kinds) if "sliding" in kind]
    config["model"] |= {
        "layers": [{"at": at, "attention": {"window": window}} for at in windowed] if window else [],
        "logit_soft_cap": fields.optional("final_logit_softcapping", 30.0),
    }
    config["attention"] |= {
        "head_dim": fields.get("head_dim", 256),
        "soft_cap": fields.optional("attn_logit_softcapping", 50.0),
        "scale": max(fields.number("query_pre_attn_scalar", 256), 1e-9) ** -0.5,
    }
    config["feedforward"]["activation"] = fields.activation("hidden_activation", "gelu_pytorch_tanh")
    return config


def _qwen3(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    config = _llama_like(fields)
    num_layers = config["model"]["num_layers"]
    fields.require("layer_types", ["full_attention"] * num_layers)
    config["attention"] |= {"head_dim": fields.get("head_dim", 128), "qk_norm_eps": config["norm"]["eps"]}
    config["feedforward"]["activation"] = fields.activation("hidden_act", "silu")
    return config


def _vit(fields: Fields) -> dict[str, Any]:
    return {
        "model": {
            "image_size": _side(fields, "image_size", 224),
            "patch_size": _side(fields, "patch_size", 16),
            "channels": fields.get("num_channels", 3),
            "num_classes": _count(fields, "id2label"),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.get("num_hidden_layers"),
            "dropout": fields.get("hidden_dropout_prob", 0.0),
        },
        "attention": {
            "num_heads": fields.get("num_attention_heads"),
            "dropout": fields.get("attention_probs_dropout_prob", 0.0),
            "bias": fields.get("qkv_bias", True),
            "out_bias": True,
        },
        "feedforward": {
            "width": fields.get("intermediate_size"),
            "activation": fields.activation("hidden_act", "gelu"),
        },
        "norm": {"eps": fields.get("layer_norm_eps", 1e-12)},
    }


def _count(fields: Fields, name: str) -> int:
    named = fields.get(name, {"0": "", "1": ""})  # two classes are not written
    if not isinstance(named, dict):
        raise ValueError(f"{name} of config.json must name the classes, got {shown(named)}")
    return len(named)


def _side(fields: Fields, name: str, default: int) -> Any:
    side = fields.get(name, default)
    if not isinstance(side, list):
        return side
    if len(set(side)) != 1:
        raise ValueError(f"{name} of config.json must be square, got {shown(side)}")
    return side[0]


def _t5(fields: Fields) -> dict[str, Any]:
    hidden_dim, tied = fields.size("d_model"), fields.get("tie_word_embeddings", True)
    gated, _, activation = str(fields.get("feed_forward_proj", "relu")).rpartition("-")
    if gated not in ("", "gated"):
        raise ValueError(f"feed_forward_proj of config.json must be relu or gated-gelu, got {gated}-{activation}")
    # Theirs takes the tanh form in this combination.
    activation = "gelu_new" if (gated, activation) == ("gated", "gelu") else activation
    dropout = fields.get("dropout_rate", 0.1)
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": hidden_dim,
            "num_layers": fields.get("num_layers"),
            "num_decoder_layers": fields.get("num_decoder_layers", fields.get("num_layers")),
            "context_length": fields.get("n_positions", 512),
            "dropout": dropout,
            "tie_embeddings": tied,
            "logit_scale": hidden_dim**-0.5 if fields.get("scale_decoder_outputs", tied) else 1.0,
            "start_token": fields.get("decoder_start_token_id", fields.get("pad_token_id", 0)),
        },
        "attention": {"num_heads": fields.get("num_heads"), "head_dim": fields.get("d_kv"), "dropout": dropout},
        "feedforward": {
            "name": "gated_mlp" if gated else "fused_mlp",
            "width": fields.get("d_ff"),
            "activation": Fields({"feed_forward_proj": activation}).activation("feed_forward_proj", "relu"),
            "dropout": dropout,
        },
        "norm": {"eps": fields.get("layer_norm_epsilon", 1e-6)},
        "position": {
            "num_buckets": fields.get("relative_attention_num_buckets", 32),
            "max_distance": fields.get("relative_attention_max_distance", 128),
        },
    }


# model_type -> a shipped model of its architecture, the family of its weights, and its reader.
READERS: Final[dict[str, tuple[str, str, Callable[[Fields], dict[str, Any]]]]] = {
    "gpt2": ("gpt2_small", "gpt2", _gpt2),
    "bert": ("bert_base", "bert", _bert),
    "llama": ("llama3_8b", "llama", _llama),
    "mistral": ("mistral_7b", "llama", _mistral),
    "mixtral": ("mixtral_8x7b", "mixtral", _mixtral),
    "gemma2": ("gemma2_2b", "gemma2", _gemma2),
    "qwen3": ("qwen3_8b", "qwen3", _qwen3),
    "vit": ("vit_b16", "vit", _vit),
    "t5": ("t5_small", "t5", _t5),
}
