"""rebuild -- the same model with other components, and with its weights."""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..components import Carried, carry_weights, compare_weights
from .build import build, compose
from .sources import Source


class _Report(Exception):
    """Its text is a report.

    Attributes:
        carried: the report.
    """

    def __init__(self, carried: Carried) -> None:
        super().__init__(carried)
        self.carried = carried


class RebuildWarning(_Report, UserWarning):
    """Some weights did not carry over. Its text is the report."""

    def __str__(self) -> str:
        advice = "\nThose that are new, or have another shape, are initialised anew."
        return f"{self.carried}{advice if self.carried.new or self.carried.reshaped else ''}"


class RebuildError(_Report, ValueError):
    """Some weights would not carry over, and `rebuild` was asked to be strict. Its text is the report."""

    def __str__(self) -> str:
        return f"{self.carried}\nNothing was built; rebuild without strict=True initialises what did not carry."


def rebuild(
    model: nn.Module, overrides: Sequence[str] = (), *, config: Source | None = None, strict: bool = False
) -> nn.Module:
    """Return the model that `overrides` make of a model's config, with the model's weights.

    Each weight (parameter or persistent buffer) that fits the new model is copied, see `components.carry_weights`. The
    others are initialised as by `build`. A `RebuildWarning` names them and the old weights that were not copied.
    `components.compare_weights` of the two models gives the same report.

    The old model does not change. A copied weight keeps its device, dtype, requires_grad and ties to other weights. A
    new weight has the device and dtype of the weight in its place or beside it, and requires grad. Modules keep train
    or eval mode by name. Hooks, gradients, adapters and wrappers are not copied. Make a new optimizer: the old one
    holds the old parameters.

    A config holds values, not references: gpt_nano's feedforward.dropout comes from model.dropout, but an override of
    model.dropout does not change it.

    `rebuild` needs the memory of both models. A model with new weights is first built on the CPU; the state of torch's
    default generator is restored afterwards.

    Args:
        model: one that `build` or `rebuild` returned; it is not changed.
        overrides: of its config, as for `compose`.
        config: for a model that `build` did not make: its config, as `compose` takes it.
        strict: whether a weight that is not copied raises a RebuildError instead of a warning.

    Raises:
        TypeError, OSError, ValueError: as `compose` and `build`; or the model does not know its config.
        RebuildError: with `strict`, the report.

    >>> model = build("gpt_nano", ["feedforward=mlp", "fusion=off", "model.num_layers=1"])
    >>> fused = rebuild(model, ["feedforward=fused_mlp"], strict=True)
    >>> torch.equal(fused.blocks[0].feedforward.up.weight, model.blocks[0].feedforward.up.weight)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"rebuild takes a model, got a {type(model).__name__}; build(config) makes one")
    wanted = compose(_config_of(model) if config is None else config, overrides)
    before = dict(_tensors(model))
    with torch.device("meta"):
        rebuilt = build(wanted)
    carried = compare_weights(model, rebuilt)
    if strict and not carried.complete:
        raise RebuildError(carried)
    has_values = not before or not all(tensor.is_meta for tensor in before.values())
    if has_values and not _is_covered(rebuilt, carried):
        with torch.device("cpu"), torch.random.fork_rng(devices=()):
            rebuilt = build(wanted)
    _place(rebuilt, before, frozenset(carried.carried))
    carry_weights(model, rebuilt)
    _set_modes(rebuilt, {name: module.training for name, module in model.named_modules()})
    if not carried.complete:
        warnings.warn(RebuildWarning(carried), stacklevel=2)
    return rebuilt


def _config_of(model: nn.Module) -> Source:
    known = vars(model).get("built_from")
    if known is None:
        raise ValueError(
            f"this {type(model).__name__} does not know its config, since build did not return it; "
            "pass the model that build returned, not a wrapper or a submodule of it, or its config with config="
        )
    source: Source = known
    return source


def _is_covered(rebuilt: nn.Module, carried: Carried) -> bool:
    """Return whether every tensor of a model is a carried weight, so that none has to be initialised."""
    tensors = dict(_tensors(rebuilt))
    # A tensor that is neither parameter nor buffer can only come from the constructor.
    loose = any(isinstance(value, Tensor) for module in rebuilt.modules() for value in vars(module).values())
    return not loose and tensors.keys() == set(carried.carried)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _place(rebuilt: nn.Module, before: Mapping[str, Tensor], carried: frozenset[str]) -> None:
    """Give every tensor the old one's device and dtype, and every carried parameter its requires_grad and its ties."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(tensor), name) for name, tensor in _tensors(rebuilt)}
    placed: dict[str | int, Tensor] = {}
    # Tensor by tensor, and without another reference, so that two copies of all weights never exist at once.
    for name in tied:
        owner_name, _, leaf = name.rpartition(".")
        owner = rebuilt.get_submodule(owner_name)
        tensor: Tensor = getattr(owner, leaf)
        old = before.get(name)
        carries = old is not None and name in carried
        # Tied in the new model, or tied by the caller in the old one.
        new = placed.get(tied[name], placed.get(id(old)) if carries else None)
        if new is None:
            beside = _nearest(name, before) if old is None else old
            dtype = beside.dtype if tensor.is_floating_point() and beside.is_floating_point() else tensor.dtype
            if tensor.is_meta:
                new = torch.empty_like(tensor, device=beside.device, dtype=dtype)
            else:
                new = tensor.detach().to(device=beside.device, dtype=dtype)
            if isinstance(tensor, nn.Parameter):
                flag = old.requires_grad if old is not None and carries else tensor.requires_grad
                new = nn.Parameter(new, requires_grad=flag)
        placed[tied[name]] = new
        if carries:
            placed[id(old)] = new
        setattr(owner, leaf, new)


def _nearest(name: str, before: Mapping[str, Tensor]) -> Tensor:
    """Return the first floating tensor of the smallest module around a name that has one, or an empty one."""
    parts = name.split(".")
    for depth in reversed(range(len(parts))):
        around = "".join(f"{part}." for part in parts[:depth])
        for other, weight in before.items():
            if other.startswith(around) and weight.is_floating_point():
                return weight
    return torch.empty(0)


def _set_modes(rebuilt: nn.Module, modes: Mapping[str, bool]) -> None:
    for name, module in rebuilt.named_modules():
        known = name
        while known not in modes:
            known = known.rpartition(".")[0]
        # Not `train()`, which is recursive, and which a module may have overridden.
        module.training = modes[known]
