"""The fields of a config.json, each read through a check.

A missing field gets the default of `transformers`. A value that this library does not support raises an error.
Otherwise a model that differs in one option would load, and compute something else.
"""

from collections.abc import Mapping
from typing import Any, Final

from ...components import REQUIRED, Option
from ...components.option import Range, judged_value
from ...names import no_such, shown

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


class Fields:
    """The fields of a config.json, each read through a check."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a field, or its default if it is missing or null. A field without a default is required."""
        value = self._content.get(name)
        if value is None and default is REQUIRED:
            raise ValueError(f"config.json has no {name}, which its model_type needs")
        return default if value is None else value

    def name_of(self, *names: str) -> str:
        """Return the first of several names of a field that config.json has, or the last name."""
        return next((name for name in names if self._content.get(name) is not None), names[-1])

    def checked(self, name: str, kind: type, *, default: Any = REQUIRED, **bounds: float) -> Any:
        """Return a field that must have this type and, if it is a number, lie within the bounds of a `Range`."""
        option = Option(name, annotation=kind, default=REQUIRED, doc="", range=Range(**bounds))
        return judged_value(f"{name} of config.json", self.get(name, default), option)

    def optional(self, name: str, default: Any = None) -> Any:
        """Return a field, or its default if it is missing. Null is a value of its own."""
        return self._content.get(name, default)

    def require(self, name: str, value: Any) -> None:
        """Raise ValueError if a field differs from `value`, its default and the only value that is supported."""
        content = self.get(name, value)
        if content != value:
            raise ValueError(f"config.json has {name} = {shown(content)}; this library supports only {shown(value)}")

    def activation(self, name: str, default: str) -> str:
        """Return the activation under our name."""
        theirs = self.get(name, default)
        return str(translated(_ACTIVATIONS, theirs, called=f"activation ({name} of config.json)"))


def shared(
    fields: Fields,
    *,
    tied: bool,
    context_length: Any = REQUIRED,
    width: str = "intermediate_size",
    activation: tuple[str, str] = ("hidden_act", "gelu"),
) -> dict[str, Any]:
    """Return the options that most families share."""
    return {
        "model": {
            "vocab_size": fields.get("vocab_size"),
            "hidden_dim": fields.get("hidden_size"),
            "num_layers": fields.checked("num_hidden_layers", int, minimum=1),
            "context_length": fields.get("max_position_embeddings", context_length),
            "tie_embeddings": fields.get("tie_word_embeddings", tied),
        },
        "attention": {"num_heads": fields.get("num_attention_heads")},
        "feedforward": {
            "width": fields.get(width),
            "activation": fields.activation(*activation),
        },
    }


def grouped_heads(fields: Fields) -> dict[str, Any]:
    """Return the options of attention that Llama, its descendants and Phi share."""
    return {
        "num_kv_heads": fields.optional("num_key_value_heads"),
        "head_dim": fields.optional("head_dim"),
        "dropout": fields.get("attention_dropout", 0.0),
    }


def translated(table: Mapping[str, Any], name: Any, *, called: str) -> Any:
    """Return the entry of a name; raise ValueError for an unknown name."""
    # A list, since the name may be any JSON value, also one that is not hashable.
    if name not in list(table):
        raise ValueError(no_such(called, name, table))
    return table[name]
