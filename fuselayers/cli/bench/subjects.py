"""The candidates for one op or model, without those with wrong numbers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...components.model.plain_torch import plain_twin
from ...configs import Config, build, compose
from ...errors import in_one_line
from ...partition import fuse
from ..example import example_batch
from ..plain import plain_config, with_values
from .cases import OpCase, Outputs, Settings, double, dtype_name, op_case
from .measure import COMPILE, PLAIN, Candidate, Subject, wrong_numbers

OURS: Final = "fuselayers"
EAGER: Final = "eager"
_LAYERS: Final = "plain layers"
_SEQUENCES: Final = 4


def op_subject(op: str, settings: Settings, *, backends: Sequence[str]) -> Subject:
    """Return an op in plain eager PyTorch, the same through `torch.compile`, the op as it is called, and on backends.

    Raises:
        ValueError: no such op, or settings that do not fit it.
    """
    torch.compiler.reset()  # after eight recompilations Dynamo would run a function uncompiled
    case = op_case(op, settings)
    makers: dict[str, Callable[[], Callable[..., Outputs]]] = {
        COMPILE: lambda: torch.compile(case.plain, fullgraph=True),
        OURS: lambda: case.op,
    }
    for backend in backends:
        makers[backend] = partial(fuse, case.op, backend=backend, fallback=())
    candidates, wrong = [_op_candidate(PLAIN, case, case.plain)], {}
    for name, make in makers.items():
        try:
            reason = _op_fault(name, make(), op, settings)
        except Exception as error:  # a compiler failed, or memory ran out; the others are measured
            reason = in_one_line(error)
        if reason is None:
            candidates.append(_op_candidate(name, case, make()))
        else:
            wrong[name] = reason
    size = next(iter(case.tensors.values())).nbytes
    return Subject(
        title=", ".join([op, *(f"{name} {value}" for name, value in case.options.items())]),
        shape=settings.shape,
        dtype=dtype_name(settings.dtype),
        candidates=candidates,
        wrong=wrong,
        inputs=tuple(case.tensors.values()),
        floor=None if case.floor is None else (case.floor[0] * size, case.floor[1] * size),
    )


def _op_candidate(name: str, case: OpCase, function: Callable[..., Outputs]) -> Candidate:
    arguments: dict[str, Any] = case.tensors | case.options

    def call() -> tuple[Tensor, ...]:
        outputs = function(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return Candidate(name, call, tuple(tensor for tensor in case.tensors.values() if tensor.requires_grad))


def _op_fault(name: str, function: Callable[..., Outputs], op: str, settings: Settings) -> str | None:
    """Return the error of an implementation of an op, or None.

    Every implementation is compared with plain PyTorch without dropout, since `F.dropout` draws other masks. An
    implementation with the library's masks is also compared with the op's formula, with dropout.
    """
    still = op_case(op, replace(settings, dropout=0.0))
    checks = [(still, still.plain)]
    if name != COMPILE and settings.dropout and "p" in still.options:
        case = op_case(op, settings)
        checks.append((case, partial(case.op, backend="eager")))
    for case, right in checks:
        wrong = wrong_numbers(
            [_op_candidate(name, case, function)],
            eager=_op_candidate(PLAIN, case, right),
            truth=_op_candidate("float64", double(case), right),
        )
        if wrong:
            return wrong[name]
    return None


@dataclass(frozen=True)
class ModelCall:
    """A training loss.

    Attributes:
        name: a model of the configs, or its path.
        shape: sequences and tokens, or examples for a model without a context length; None takes 4 of full length.
        dropout: of every component; 0 also turns stochastic depth off; None keeps the config's.
        dtype: of the weights.
    """

    name: str
    overrides: tuple[str, ...]
    shape: tuple[int, ...] | None
    dropout: float | None
    dtype: torch.dtype
    device: torch.device


def model_subject(call: ModelCall, *, backends: Sequence[str]) -> Subject:
    """Return a model in plain PyTorch, the same through `torch.compile` and on backends, and our layers on backends.

    Our layers are fused as the config says, or by block if it fuses nothing. The backend "eager" runs our layers
    unfused. If the model has no twin in plain PyTorch, our layers in eager mode replace the twin; the title says so.

    Raises:
        ValueError: no such model, or an override or a shape does not fit.
    """
    torch.compiler.reset()
    config = _config(call)
    torch.manual_seed(0)
    not_fused = replace(config, fusion=replace(config.fusion, scope="none"))
    own, unfused = (_built(call, form) for form in (not_fused, plain_config(config)))
    unfused.load_state_dict(own.state_dict())
    shape, inputs = _batch(call, config, unfused)
    candidate = partial(model_candidate, inputs)
    count = sum(parameter.numel() for parameter in own.parameters())
    title = f"{call.name}, {count:,} parameters, {config.feedforward.name}"
    baseline, why_no_twin = _twin(unfused)
    theirs = [candidate(_LAYERS if why_no_twin else PLAIN, baseline)]
    theirs.append(candidate(COMPILE, torch.compile(baseline)))
    ours = []
    for backend in backends:
        if backend == EAGER:
            ours.append(candidate(EAGER, own))
            continue
        theirs.append(candidate(f"{theirs[0].name}, {backend}", fuse(baseline, backend=backend, fallback=())))
        fused = _built(call, _fused(config, backend))
        fused.load_state_dict(own.state_dict())
        ours.append(candidate(backend, fused))
    exact = copy.deepcopy(unfused).double()
    truth = candidate("float64", exact)
    # With dropout only the library's own models have the same masks.
    wrong = wrong_numbers(ours, eager=candidate(EAGER, unfused), truth=truth)
    if call.dropout == 0:
        wrong |= wrong_numbers([form for form in theirs if form.name != COMPILE], eager=theirs[0], truth=truth)
    right = [form for form in (*theirs, *ours) if form.name not in wrong]
    return Subject(f"{title}; {why_no_twin}" if why_no_twin else title, shape, dtype_name(call.dtype), right, wrong)


def first_candidate(call: ModelCall, name: str) -> Candidate:
    """Return one compiled candidate of `model_subject`.

    Args:
        name: COMPILE, or the backend of our layers.
    """
    config = _config(call)
    config = plain_config(config) if name == COMPILE else _fused(config, name)
    model = _built(call, config)
    _, inputs = _batch(call, config, model)
    if name != COMPILE:
        return model_candidate(inputs, name, model)
    baseline, _ = _twin(model)
    return model_candidate(inputs, name, torch.compile(baseline))


def _fused(config: Config, backend: str) -> Config:
    scope = "block" if config.fusion.scope == "none" else config.fusion.scope
    return replace(config, fusion=replace(config.fusion, backend=backend, scope=scope))


def _twin(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model in plain PyTorch, or the model itself and the reason why it has no twin."""
    try:
        return plain_twin(model), ""
    except ValueError as error:
        return model, str(error)


def _built(call: ModelCall, config: Config) -> nn.Module:
    return build(config).to(device=call.device, dtype=call.dtype).train()


def _batch(call: ModelCall, config: Config, model: nn.Module) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Return the shape of a batch, and a random batch."""
    context = config.model.options.get("context_length")
    shape = call.shape or ((_SEQUENCES,) if context is None else (_SEQUENCES, context))
    return shape, example_batch(model, config, shape, device=call.device, option="--shape")


def model_candidate(inputs: Sequence[Tensor], name: str, model: Any) -> Candidate:
    """A training loss of a model, with the gradients of its parameters. Used by `tune` too."""
    # Sorted by name: the twin's parameters are in another order.
    parameters = tuple(parameter for _, parameter in sorted(model.named_parameters()))
    cast = [tensor.to(parameters[0].dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
    return Candidate(name, lambda: (model(*cast),), parameters)


def _config(call: ModelCall) -> Config:
    config = compose(call.name, call.overrides)
    if call.dropout is None:
        return config
    values = {"dropout": call.dropout} if call.dropout else {"dropout": 0.0, "stochastic_depth": 0.0}
    return with_values(config, lambda option, value: values.get(option, value))
