"""The candidates for one op or model, without those with wrong numbers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...configs import Config, build, compose
from ...partition import fuse
from ..example import example_batch
from ..plain import plain_config, with_values
from ..plain_torch import plain_twin
from .cases import OpCase, Outputs, Settings, double, dtype_name, op_case
from .measure import EAGER, Candidate, disagreement, results

COMPILE: Final = "torch.compile"
PLAIN: Final = "plain"
_LAYERS: Final = "plain layers"
_SEQUENCES: Final = 4

Implementation = Callable[[OpCase], Callable[..., Outputs]]
"""Given a case, the function that a candidate calls."""


@dataclass(frozen=True)
class Subject:
    """An op or a model: candidates with right numbers, plain PyTorch first, and the errors of the others by name."""

    title: str
    candidates: list[Candidate]
    wrong: dict[str, str]


def op_candidate(name: str, case: OpCase, function: Callable[..., Outputs]) -> Candidate:
    """A candidate that calls `function` with the case's tensors and options by name."""
    arguments: dict[str, Any] = case.tensors | case.options

    def call() -> tuple[Tensor, ...]:
        outputs = function(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return Candidate(name, call, tuple(tensor for tensor in case.tensors.values() if tensor.requires_grad))


def wrong_numbers(candidates: Sequence[Candidate], *, eager: Candidate, truth: Candidate) -> dict[str, str]:
    """The error of each wrong candidate, by name; the error of `eager` sets the limit, against `truth` in float64."""
    limit, exact = results(eager), results(truth)
    found = {one.name: disagreement(results(one), eager=limit, truth=exact) for one in candidates}
    return {name: reason for name, reason in found.items() if reason is not None}


def op_fault(
    name: str,
    implementation: Implementation,
    settings: Settings,
    op: str,
    *,
    candidate: Callable[[str, OpCase, Callable[..., Outputs]], Candidate] = op_candidate,
    same_masks: bool,
) -> str | None:
    """The error of an implementation of an op, or None.

    Every implementation is compared with plain PyTorch without dropout, since `F.dropout` draws other masks; one with
    the library's masks (`same_masks`) also with the op's formula.
    """
    still = op_case(op, replace(settings, dropout=0.0))
    checks = [(still, still.plain)]
    if settings.dropout and same_masks:
        case = op_case(op, settings)
        checks.append((case, case.formula))
    for case, plain in checks:
        wrong = wrong_numbers(
            [candidate(name, case, implementation(case))],
            eager=op_candidate(EAGER, case, plain),
            truth=op_candidate("float64", double(case), plain),
        )
        if wrong:
            return wrong[name]
    return None


def op_subject(name: str, settings: Settings, *, backends: Sequence[str]) -> Subject:
    """An op: plain eager PyTorch, and the op on each backend.

    Raises:
        ValueError: no such op, or settings that do not fit it.
    """
    case = op_case(name, settings)
    candidates, wrong = [op_candidate(PLAIN, case, case.plain)], {}
    for backend in backends:
        implementation = _op_implementation(backend)
        reason = op_fault(backend, implementation, settings, name, same_masks=backend != COMPILE)
        if reason is None:
            candidates.append(op_candidate(backend, case, implementation(case)))
        else:
            wrong[backend] = reason
    details = [f"{key} {value}" for key, value in case.options.items()]
    shapes = [f"{key} {list(tensor.shape)}" for key, tensor in case.tensors.items()]
    title = ", ".join([f"op {name}: {' '.join(shapes)}", *details, dtype_name(settings.dtype)])
    return Subject(title, candidates, wrong)


def _op_implementation(backend: str) -> Implementation:
    if backend == EAGER:
        return lambda case: case.formula
    if backend == COMPILE:
        return lambda case: torch.compile(case.plain)
    return lambda case: fuse(case.op, backend=backend, fallback=(), static_argnames=tuple(case.options))


@dataclass(frozen=True)
class ModelCall:
    """A training loss that can be asked for in another process too.

    Attributes:
        name: a model of the configs, or its path.
        overrides: of its config.
        shape: sequences and tokens, or examples for a model without a context length; None is 4 of full length.
        dropout: of every component; 0 also turns stochastic depth off; None keeps the config's.
        dtype: of the weights.
        device: of the model.
    """

    name: str
    overrides: tuple[str, ...]
    shape: tuple[int, ...] | None
    dropout: float | None
    dtype: torch.dtype
    device: torch.device

    def forms(self, backends: Sequence[str]) -> tuple[str, list[Candidate], list[Candidate], list[Candidate]]:
        """Return the title; plain PyTorch, it fused and under `torch.compile`; our layers, fused; eager and float64.

        A model without a twin in plain PyTorch stands for it with its own layers in eager mode; the title says so.
        Nothing is compiled before a candidate is called.

        Raises:
            ValueError: no such model, an override or a shape that does not fit.
        """
        config = _with_dropout(compose(self.name, self.overrides), self.dropout)
        config = replace(config, fusion=replace(config.fusion, scope="none"))
        options, shape = config.model.options, self.shape
        context = options.get("context_length")
        if shape is None:
            shape = (_SEQUENCES,) if context is None else (_SEQUENCES, context)
        if context is not None and (len(shape) != 2 or shape[1] > context):
            raise ValueError(
                f"a model's --shape must be sequences x tokens, with at most {context} tokens, as {_SEQUENCES}x"
                f"{context}; got {'x'.join(map(str, shape))}"
            )
        torch.manual_seed(0)
        own = build(config).to(device=self.device, dtype=self.dtype).train()
        unfused = build(plain_config(config)).to(device=self.device, dtype=self.dtype).train()
        unfused.load_state_dict(own.state_dict())
        examples = example_batch(unfused, config, shape, device=self.device, option="--shape")
        highest = options.get("vocab_size", options.get("num_classes", 1))
        inputs = [one.normal_() if one.is_floating_point() else one.random_(highest) for one in examples]

        def candidate(label: str, model: Callable[..., Tensor], weights: nn.Module) -> Candidate:
            # By name: the twin has its parameters in another order.
            parameters = tuple(parameter for _, parameter in sorted(weights.named_parameters()))
            like = [one.to(parameters[0].dtype) if one.is_floating_point() else one for one in inputs]
            return Candidate(label, lambda: (model(*like),), parameters)

        exact = copy.deepcopy(unfused).double()
        limits = [candidate(EAGER, unfused, unfused), candidate("float64", exact, exact)]
        ours = [
            candidate(backend, own if backend == EAGER else fuse(own, backend=backend, fallback=()), own)
            for backend in backends
            if backend != COMPILE
        ]
        title = (
            f"model {self.name}: {sum(parameter.numel() for parameter in own.parameters()):,} parameters, "
            f"{config.feedforward.name}, {' x '.join(map(str, shape))} {'examples' if context is None else 'tokens'}, "
            f"{dtype_name(self.dtype)}"
        )
        try:
            baseline: nn.Module = plain_twin(unfused)
        except ValueError as error:
            title, baseline, label = f"{title}; {error}", unfused, _LAYERS
        else:
            label = PLAIN
        theirs = [candidate(label, baseline, baseline)]
        for backend in backends if label == PLAIN else ():
            if backend not in (EAGER, COMPILE):
                fused = fuse(baseline, backend=backend, fallback=())
                theirs.append(candidate(f"{PLAIN}, {backend}", fused, baseline))
        if COMPILE in backends:
            theirs.append(candidate(COMPILE, torch.compile(baseline), baseline))
        return title, theirs, ours, limits


def model_subject(model: ModelCall, *, backends: Sequence[str]) -> Subject:
    """A model in all forms with right numbers.

    Raises:
        ValueError: no such model, an override or a shape that does not fit.
    """
    title, theirs, ours, (eager, truth) = model.forms(backends)
    # With dropout only the library's own models have the same masks.
    wrong = wrong_numbers(ours, eager=eager, truth=truth)
    if model.dropout == 0:
        wrong |= wrong_numbers([one for one in theirs if one.name != COMPILE], eager=theirs[0], truth=truth)
    return Subject(title, [one for one in [*theirs, *ours] if one.name not in wrong], wrong)


def _with_dropout(config: Config, dropout: float | None) -> Config:
    if dropout is None:
        return config
    changed = {"dropout": dropout} if dropout else {"dropout": 0.0, "stochastic_depth": 0.0}
    return with_values(config, lambda option, value: changed.get(option, value))
