"""The loss of a causal language model of transformers, without its logits.

Their forwards compute logits, then, under `if labels is not None`, a loss from them, and return both:

    logits = self.lm_head(hidden_states[:, slice_indices, :])
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits, ...)

Some call `.contiguous()` of the logits, and some put them into a tuple under `if not return_dict`.

In training with labels, `ops.linear_cross_entropy` takes the place of both, and the logits returned are None. In
evaluation mode, without labels, or where the forward makes such a tuple, nothing changes.
"""

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from .slots import is_linear
from .steps import Branch, Forward, Global, Literal, Local, OfSelf, Operation, Ref, Run, Step

__all__ = ["NAME", "SLOTS", "with_fused_loss"]

NAME: Final = "causal_lm_loss"
SLOTS: Final = {"head": is_linear}
_HIDDEN: Final = "_fuselayers_hidden"
_CALL_OF_HEAD: Final = ("call", None, (False,), ())
_CONTIGUOUS: Final = ("call", "contiguous", (), ())
_MAKES_TUPLE: Final = "not return_dict"
_BY_POSITION: Final = ("logits", "labels", "vocab_size")


def with_fused_loss(forward: Forward, holds: Callable[[str, str], bool]) -> tuple[Forward, str, dict[str, Any]] | None:
    """Return the forward with the fused loss, the path of its head, and the functions it calls; None if it is another.

    Args:
        forward: what was read.
        holds: whether the attribute at a path is what a slot asks for.
    """
    if not any(argument.arg == "labels" for argument in forward.arguments.args):
        return None
    if _binds(forward.body, "labels"):
        return None
    for place, run in enumerate(forward.body):
        if not isinstance(run, Run):
            continue
        for name, ref in run.bound.items():
            head = _head(run, ref, holds)
            body = None if head is None else _rewritten(forward.body, place, name, head)
            if body is not None:
                assert head is not None
                return replace(forward, body=body), head, _FUNCTIONS
    return None


def _head(run: Run, ref: Ref, holds: Callable[[str, str], bool]) -> str | None:
    """The path of the linear layer that a value is the result of."""
    made = _made(run, ref)
    if made is not None and (operation := run.steps[made.number]).kind == _CALL_OF_HEAD:
        called = operation.operands[0]
        if isinstance(called, OfSelf) and holds("head", called.path) and _uses(run, ref) == 0:
            return called.path
    return None


def _made(run: Run, ref: Ref) -> Step | None:
    """The step whose result a value is, or is a contiguous copy of that nothing else reads."""
    if isinstance(ref, Step) and (operation := run.steps[ref.number]).kind == _CONTIGUOUS:
        (ref,) = operation.operands
        if _uses(run, ref) != 1 or ref in run.bound.values():
            return None
    return ref if isinstance(ref, Step) else None


def _uses(run: Run, ref: Ref) -> int:
    return sum(operation.operands.count(ref) for operation in run.steps)


def _rewritten(body: list[Any], place: int, name: str, head: str) -> list[Any] | None:
    """The body with logits called `name` left out; None if they are used in another way than for the loss."""
    run, rest = body[place], body[place + 2 :]
    branch: Any = body[place + 1] if len(body) > place + 1 else None
    if not _is_of_loss(branch, name):
        return None
    tuples = [one for one in rest if _makes_tuple(one)]
    if not all(_only_returns(one, name) for one in rest if one not in tuples):
        return None
    made = _made(run, run.bound[name])
    assert made is not None
    _, hidden = run.steps[made.number].operands
    # The loss reads the hidden states, which the head has read.
    (inner,) = branch.body
    if any(map(_writes, [*run.steps[made.number :], *inner.steps])):
        return None
    given: list[Ref] = [hidden, Local("labels")]
    if tuples:
        return_dict = run.bound.get("return_dict", Local("return_dict"))
        is_later = isinstance(return_dict, Step) and return_dict.number > made.number
        if is_later or _binds(body[place + 1 :], "return_dict"):
            return None
        given.append(return_dict)
    call = _call("_fuselayers_logits", OfSelf(""), OfSelf(head), *given)
    steps = list(run.steps)
    steps[made.number] = call
    if made != run.bound[name]:
        steps[run.bound[name].number] = _call("_fuselayers_contiguous", made)
    first = replace(run, steps=steps, bound={**run.bound, _HIDDEN: hidden})
    steps = [_fused_call(step, head) if _is_loss_call(step, name) else step for step in inner.steps]
    second = replace(branch, body=[replace(inner, steps=steps)])
    return [*body[:place], first, second, *rest]


def _writes(step: Operation) -> bool:
    """Whether a step calls what writes in place, by its name; statements such as `x += 1` are no steps."""
    if step.kind[0] != "call":
        return False
    called = step.operands[0]
    name = step.kind[1] or (getattr(called.value, "__name__", "") if isinstance(called, Global) else "")
    return str(name).endswith("_")


def _binds(body: list[Any], name: str) -> bool:
    """Whether a part of a body gives a local variable another value."""
    for one in body:
        if isinstance(one, Branch):
            if _stores(one.test, name) or _binds(one.body + one.orelse, name):
                return True
        elif _stores(one, name) if isinstance(one, ast.stmt) else name in one.bound:
            return True
    return False


def _stores(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load) for one in ast.walk(node)
    )


def _call(name: str, *operands: Ref) -> Operation:
    return Operation(("call", None, (False,) * len(operands), ()), (Global(None, name), *operands))


def _makes_tuple(one: Any) -> bool:
    """Whether this runs where there are logits alone; see `_logits`."""
    return isinstance(one, Branch) and ast.unparse(one.test) == _MAKES_TUPLE and not one.orelse


def _is_of_loss(one: Any, name: str) -> bool:
    """Whether this is `if labels is not None:` with nothing but the loss of these logits in it."""
    if not isinstance(one, Branch) or ast.unparse(one.test) != "labels is not None" or one.orelse:
        return False
    if len(one.body) != 1 or not isinstance(one.body[0], Run):
        return False
    run = one.body[0]
    uses = [step for step in run.steps if Local(name) in step.operands]
    return len(uses) == 1 and _is_loss_call(uses[0], name) and Local(name) not in run.bound.values()


def _is_loss_call(step: Operation, name: str) -> bool:
    arguments = _arguments(step)
    return (
        arguments is not None
        and arguments.get("logits") == Local(name)
        and arguments.get("labels") == Local("labels")
        and arguments.keys() <= {"logits", "labels", "vocab_size", "**"}
    )


def _arguments(step: Operation) -> dict[str, Ref] | None:
    """The arguments of a call of self.loss_function by name; None for another step."""
    if step.kind[0] != "call" or step.operands[0] != OfSelf("loss_function") or any(step.kind[2]):
        return None
    _, _, stars, names = step.kind
    values = step.operands[1:]
    return dict(zip((*_BY_POSITION[: len(stars)], *names), values, strict=False))


def _fused_call(step: Operation, head: str) -> Operation:
    arguments = {**(_arguments(step) or {}), "hidden": Local(_HIDDEN), "head": OfSelf(head)}
    more = {"**": arguments.pop("**")} if "**" in arguments else {}
    by_position = Literal(int, len(step.kind[2]))
    operands = (Global(None, "_fuselayers_loss"), OfSelf(""), by_position, *arguments.values(), *more.values())
    return Operation(("call", None, (False, False), (*arguments, *more)), operands)


def _only_returns(one: Any, name: str) -> bool:
    """Whether a part of the body does no more with the logits than to put them into an output by that name."""
    if isinstance(one, Branch):
        return not _mentions(one.test, name) and all(_only_returns(inner, name) for inner in one.body + one.orelse)
    if isinstance(one, ast.stmt):
        return not _mentions(one, name)
    return all(_is_output(step, name) for step in one.steps if Local(name) in step.operands) and Local(name) not in (
        one.returned,
        *one.bound.values(),
    )


def _is_output(step: Operation, name: str) -> bool:
    if step.kind[0] != "call" or not isinstance(step.operands[0], Global):
        return False
    _, _, stars, names = step.kind
    made = step.operands[0].value
    given = dict(zip(names, step.operands[1 + len(stars) :], strict=True))
    is_output = isinstance(made, type) and issubclass(made, dict)
    return is_output and given.get("logits") == Local(name) and step.operands.count(Local(name)) == 1


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _logits(
    model: nn.Module, head: nn.Linear, hidden: Tensor, labels: Tensor | None, return_dict: bool = True
) -> Tensor | None:
    """The logits; None where the loss does without them."""
    does_without = labels is not None and model.training and torch.is_grad_enabled() and _is_causal(model.loss_function)
    if does_without and return_dict:
        return None
    logits: Tensor = head(hidden)
    return logits


def _contiguous(logits: Tensor | None) -> Tensor | None:
    return None if logits is None else logits.contiguous()


def _is_causal(loss_function: Any) -> bool:
    place = getattr(loss_function, "__module__", None), getattr(loss_function, "__name__", None)
    return place == ("transformers.loss.loss_utils", "ForCausalLMLoss")


def _loss(
    model: Any,
    by_position: int,
    *,
    logits: Tensor | None,
    labels: Tensor,
    hidden: Tensor,
    head: nn.Linear,
    **options: Any,
) -> Tensor:
    """The loss of transformers' `ForCausalLMLoss`; where there are logits, the model's own call."""
    if logits is not None:
        given = {"logits": logits, "labels": labels, **options}
        first = [given.pop(name) for name in _BY_POSITION[:by_position]]
        loss: Tensor = model.loss_function(*first, **given)
        return loss
    ignore_index, shift_labels = options.get("ignore_index", -100), options.get("shift_labels")
    num_items_in_batch: Tensor | int | None = options.get("num_items_in_batch")
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = ops.linear_cross_entropy(
        hidden,
        head.weight,
        shift_labels.to(hidden.device).view(hidden.shape[:-1]),
        bias=head.bias,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        dtype=torch.float32,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


_FUNCTIONS: Final = {
    "_fuselayers_logits": _logits,
    "_fuselayers_contiguous": _contiguous,
    "_fuselayers_loss": _loss,
}
