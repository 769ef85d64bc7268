"""The loss of a causal language model of transformers, without its logits.

Their forwards compute logits, then, under `if labels is not None`, a loss from them, and return both:

    outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, ..., **kwargs)
    logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.hidden_states, ...)

The name of the inner model, its arguments and the class of the output are read from the forward. The rest must be as
above. In training with labels `ops.linear_cross_entropy` replaces head and loss, and the returned logits are None. In
evaluation mode, or without labels, the model's own forward runs.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .... import ops
from ....module_class import unchanged_class
from ..forms import Unreadable, form_of
from ..layer import arguments_of, own_forward
from ..parts import is_linear
from ..rule import Rule

NAME: Final = "causal_lm_loss"


@dataclass(frozen=True)
class _Reading:
    """The calls in the forward of a causal language model.

    Attributes:
        head: the name of the last layer.
        model: the path of the inner model.
        positional: the names of the arguments that the inner model takes by position.
        named: for each argument that it takes by name, its name there and its name in the forward.
        fields: the names of the fields that are copied from its output to the result.
        output: the result's class.
        arguments: names the arguments of a call of the forward.
        options: the name of its `**kwargs`.
    """

    head: str
    model: str
    positional: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    fields: tuple[str, ...]
    output: Any
    arguments: Callable[[Any, Any], dict[str, Any] | None]
    options: str


def causal_lm_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the output with a loss and without logits in training with labels; else call the model's own forward."""
    cls: Any = getattr(type(self), "swapped_from", type(self))  # FSDP makes subclasses of the swapped class
    reading = _reading_of(cls)
    arguments = None if reading is None else reading.arguments(args, kwargs)
    if reading is None or arguments is None:  # the class was patched, or the forward raises
        return own_forward(self, *args, **kwargs)
    options = arguments[reading.options]
    labels, head = arguments.get("labels"), getattr(self, reading.head)
    wanted = labels is not None and self.training and torch.is_grad_enabled() and _keeps_all(arguments)
    plain = _is_causal(self.loss_function) and getattr(self.config, "return_dict", True) and is_linear(head)
    # The model's own loss views the logits as [tokens, config.vocab_size].
    fits = plain and self.config.vocab_size == head.weight.shape[0]
    if not (wanted and fits and not any(name in _OF_DECORATORS for name in options)):
        return own_forward(self, *args, **kwargs)
    inner = self
    for name in reading.model.split("."):
        inner = getattr(inner, name)
    outputs = inner(
        *(arguments[name] for name in reading.positional),
        **{there: arguments[name] for there, name in reading.named},
        **options,
    )
    assert labels is not None
    loss = _loss(outputs.last_hidden_state, head, labels, **options)
    fields = {name: getattr(outputs, name) for name in reading.fields}
    return reading.output(loss=loss, logits=None, **fields)


_OF_DECORATORS: Final = frozenset({"return_dict", "past_key_values"})
"""Arguments that a decorator of the forward takes or renames."""


def _keeps_all(arguments: Any) -> bool:
    kept = arguments.get("logits_to_keep", 0)
    return isinstance(kept, int) and kept == 0


def _is_causal(loss_function: Any) -> bool:
    origin = getattr(loss_function, "__module__", None), getattr(loss_function, "__name__", None)
    return origin == ("transformers.loss.loss_utils", "ForCausalLMLoss")


def _loss(hidden: Tensor, head: Any, labels: Tensor, **options: Any) -> Tensor:
    """The loss of transformers' `ForCausalLMLoss`."""
    ignore_index, shift_labels = options.get("ignore_index", -100), options.get("shift_labels")
    num_items_in_batch: Tensor | int | None = options.get("num_items_in_batch")
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if shift_labels.numel() != hidden.shape[:-1].numel():
        raise ValueError(
            f"labels must have one entry per token, {list(hidden.shape[:-1])}, got {list(shift_labels.shape)}"
        )
    loss = ops.linear_cross_entropy(
        hidden,
        head.weight,
        shift_labels.to(hidden.device).reshape(hidden.shape[:-1]),
        bias=head.bias,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        dtype=torch.float32,
    )
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


_readings: dict[tuple[type, Any], _Reading | None] = {}
"""The readings by class and forward, since a patch may replace the forward. A plain mapping, since Dynamo would trace
`_read` through a `functools.cache`."""


def _reading_of(cls: Any) -> _Reading | None:
    key = cls, cls.forward
    if key not in _readings:
        _readings[key] = _read(cls)
    return _readings[key]


def _read(cls: Any) -> _Reading | None:
    """Read the forward of a class; return None if it has another form."""
    try:
        result = form_of(cls).result
    except Unreadable:
        return None
    if not isinstance(result, ast.Call) or result.args:
        return None
    fields = {keyword.arg: keyword.value for keyword in result.keywords}
    logits, loss = fields.pop("logits", None), fields.pop("loss", None)
    head, inner = _head_of(logits)
    if logits is None or loss is None or head is None or inner is None:
        return None
    if ast.unparse(loss) not in {written.format(logits=ast.unparse(logits)) for written in _LOSSES}:
        return None
    called = ast.unparse(inner)
    if any(ast.unparse(value) != f"{called}.{name}" for name, value in fields.items()):
        return None
    arguments = [*inner.args, *(keyword.value for keyword in inner.keywords)]
    if not all(isinstance(argument, ast.Name) and argument.id.startswith("$") for argument in arguments):
        return None
    named = [keyword for keyword in inner.keywords if keyword.arg is not None]
    if len(named) + 1 != len(inner.keywords) or not ast.unparse(inner.func).startswith("self."):
        return None
    module, _, name = ast.unparse(result.func).rpartition(".")
    return _Reading(
        head,
        ast.unparse(inner.func).removeprefix("self."),
        tuple(ast.unparse(argument)[1:] for argument in inner.args),
        tuple((str(keyword.arg), ast.unparse(keyword.value)[1:]) for keyword in named),
        tuple(str(name) for name in fields),
        getattr(sys.modules[module], name),
        arguments_of(cls.forward),
        list(inspect.signature(cls.forward).parameters)[-1],
    )


_LOSSES: Final = (
    "self.loss_function(logits={logits}, labels=$labels, vocab_size=self.config.vocab_size, **$kwargs)"
    " if $labels is not None else None",
    "self.loss_function({logits}, $labels, vocab_size=self.config.vocab_size, **$kwargs)"
    " if $labels is not None else None",
)
_KEPT: Final = (
    "{hidden}[:, builtins.slice(-$logits_to_keep, None) if builtins.isinstance($logits_to_keep, builtins.int)"
    " else $logits_to_keep, :]",
    "transformers.modeling_utils.slice_logits_to_keep({hidden}, $logits_to_keep)",
)


def _head_of(logits: ast.expr | None) -> tuple[str | None, ast.Call | None]:
    """Return the name of the layer that computes the logits, and the call of the inner model before it."""
    if isinstance(logits, ast.Call) and ast.unparse(logits).endswith(".contiguous()"):
        logits = logits.func.value  # type: ignore[attr-defined]
    match logits:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=head), args=[kept], keywords=[]):
            inner = next((node for node in ast.walk(kept) if _is_hidden(node)), None)
            if inner is not None:
                forms = {form.format(hidden=ast.unparse(inner)) for form in _KEPT}
                if ast.unparse(kept) in forms:
                    return head, inner.value  # type: ignore[attr-defined]
    return None, None


def _is_hidden(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "last_hidden_state" and isinstance(node.value, ast.Call)


def _is_causal_lm(module: Any) -> bool:
    cls = unchanged_class(module)
    # Most modules are not models, and their forwards are not read.
    if "loss_function" not in vars(module) and not hasattr(cls, "loss_function"):
        return False
    # The loss function is read last: transformers warns for a model without a head.
    return _reading_of(cls) is not None and _is_causal(module.loss_function)


RULES: Final[tuple[Rule, ...]] = (Rule(NAME, of=nn.Module, forward=causal_lm_loss, fits=_is_causal_lm),)
