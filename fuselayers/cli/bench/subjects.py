"""The candidates that are timed for one op or model, and what each is checked against."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...components import Choice, LayerChange
from ...configs import COMPONENT_SECTIONS, Config, build, compose
from ...partition import fuse
from ..example import example_batch
from ..plain import plain_config
from .cases import OpCase, Outputs, Settings, double, dtype_name, op_case
from .measure import EAGER, Candidate

__all__ = ["COMPILE", "Check", "Proof", "Subject", "model_subject", "op_candidate", "op_subject"]

COMPILE: Final = "torch.compile"
_PLAIN: Final = "plain"
_SEQUENCES: Final = 4


@dataclass(frozen=True)
class Proof:
    """What shows that a candidate is right.

    Args:
        checked: the candidate, or what stands for it without dropout.
        eager: whose error in the same dtype is the measure.
        truth: the same in float64.
    """

    checked: Candidate
    eager: Candidate
    truth: Candidate


@dataclass(frozen=True)
class Check:
    """One candidate with its proofs, all of which must hold; none for what the others are held against."""

    timed: Candidate
    proofs: list[Proof]


@dataclass(frozen=True)
class Subject:
    """What is timed, in words and as candidates; the first is what the others are compared with."""

    title: str
    checks: list[Check]


def op_subject(name: str, settings: Settings, *, backends: Sequence[str]) -> Subject:
    """An op: plain eager PyTorch, the library's eager form, and each backend.

    F.dropout draws masks of its own, so without dropout the library's eager form is held against the plain one. All
    forms of the library draw the same masks, so with dropout a backend is held against its eager form.

    Raises:
        ValueError: no such op, or settings that do not fit it.
    """
    case, still = op_case(name, settings), op_case(name, replace(settings, dropout=0.0))
    plain, eager = op_candidate(_PLAIN, case, case.plain), op_candidate(EAGER, case, case.op)
    still_plain, still_truth = (
        op_candidate(_PLAIN, still, still.plain),
        op_candidate("float64", double(still), still.plain),
    )
    formula = Proof(op_candidate(EAGER, still, still.op), eager=still_plain, truth=still_truth)
    truth = op_candidate("float64", double(case), case.op)
    checks = [Check(plain, [])]
    for backend in backends:
        if backend == EAGER:
            checks.append(Check(eager, [formula]))
        elif backend == COMPILE:
            checked = op_candidate(COMPILE, still, torch.compile(still.plain))
            proof = Proof(checked, eager=still_plain, truth=still_truth)
            checks.append(Check(op_candidate(COMPILE, case, torch.compile(case.plain)), [proof]))
        else:
            fused = fuse(case.op, backend=backend, fallback=(), static_argnames=tuple(case.options))
            candidate = op_candidate(backend, case, fused)
            checks.append(Check(candidate, [formula, Proof(candidate, eager=eager, truth=truth)]))
    details = [f"{key} {value}" for key, value in case.options.items()]
    shapes = [f"{key} {list(tensor.shape)}" for key, tensor in case.tensors.items()]
    return Subject(", ".join([f"op {name}: {' '.join(shapes)}", *details, dtype_name(settings.dtype)]), checks)


def model_subject(
    name: str,
    overrides: Sequence[str],
    *,
    shape: tuple[int, ...] | None,
    dropout: float | None,
    backends: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
) -> Subject:
    """A model's training loss: plain eager layers, its own layers in eager mode, and the whole model fused.

    Args:
        name: a model of the configs, or a path of one.
        overrides: of its config.
        shape: sequences and tokens, or examples where there is no context length; None is 4, as long as the context.
        dropout: set for every part that has one; 0 is no stochastic depth either; None leaves the config's.
        backends: to fuse the whole model with.
        dtype: of the weights.
        device: where the model is.

    Raises:
        ValueError: no such model, an override or a shape that does not fit.
    """
    config = _with_dropout(compose(name, overrides), dropout)
    config = replace(config, fusion=replace(config.fusion, scope="none"))
    options = config.model.options
    context = options.get("context_length")
    if shape is None:
        shape = (_SEQUENCES,) if context is None else (_SEQUENCES, context)
    if context is not None and (len(shape) != 2 or shape[1] > context):
        raise ValueError(
            f"a model's --shape must be sequences x tokens, with at most {context} tokens, as {_SEQUENCES}x{context}; "
            f"got {'x'.join(map(str, shape))}"
        )
    torch.manual_seed(0)
    own = build(config).to(device=device, dtype=dtype).train()
    plain = build(plain_config(config)).to(device=device, dtype=dtype).train()
    plain.load_state_dict(own.state_dict())
    examples = example_batch(plain, config, shape, device=device, option="--shape")
    highest = options.get("vocab_size", options.get("num_classes", 1))
    inputs = [one.normal_() if one.is_floating_point() else one.random_(highest) for one in examples]

    def candidate(label: str, model: Callable[..., Tensor], weights: nn.Module) -> Candidate:
        parameters = tuple(weights.parameters())
        like = [one.to(parameters[0].dtype) if one.is_floating_point() else one for one in inputs]
        return Candidate(label, lambda: (model(*like),), parameters)

    double = copy.deepcopy(plain).double()
    truth = candidate("float64", double, double)
    baseline, eager = candidate(_PLAIN, plain, plain), candidate(EAGER, own, own)
    checks = [Check(baseline, [])]
    for backend in backends:
        if backend == EAGER:
            other = eager
        elif backend == COMPILE:
            other = candidate(COMPILE, torch.compile(plain), plain)
        else:
            other = candidate(backend, fuse(own, backend=backend, fallback=()), own)
        checks.append(Check(other, [Proof(other, eager=baseline, truth=truth)]))
    parameters = sum(parameter.numel() for parameter in own.parameters())
    title = (
        f"model {name}: {parameters:,} parameters, {config.feedforward.name}, "
        f"{' x '.join(map(str, shape))} {'examples' if context is None else 'tokens'}, {dtype_name(dtype)}"
    )
    return Subject(title, checks)


def op_candidate(label: str, case: OpCase, function: Callable[..., Outputs]) -> Candidate:
    """A candidate that calls `function` with the case's tensors, each by its name. Used by the suite too."""
    arguments: dict[str, Any] = case.tensors | case.options

    def call() -> tuple[Tensor, ...]:
        outputs = function(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return Candidate(label, call, tuple(tensor for tensor in case.tensors.values() if tensor.requires_grad))


def _with_dropout(config: Config, dropout: float | None) -> Config:
    if dropout is None:
        return config
    return replace(config, **{name: _dropping(getattr(config, name), dropout) for name in COMPONENT_SECTIONS})


def _dropping(value: Any, dropout: float) -> Any:
    """The same of what is within it, as in `plain_config`. Branches that are left out are none where nothing drops."""
    if isinstance(value, Choice):
        return Choice(value.name, _dropping(value.options, dropout))
    if isinstance(value, LayerChange):
        return LayerChange(**_dropping(vars(value), dropout))
    if isinstance(value, Mapping):
        changed = {"dropout": dropout} if dropout else {"dropout": 0.0, "stochastic_depth": 0.0}
        return {key: changed.get(key, _dropping(entry, dropout)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_dropping(entry, dropout) for entry in value)
    return value
