"""rebuild -- the same model with other components and the same weights."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..components import Carried, carry_weights, compare_weights
from .build import Source, build, compose


class RebuildWarning(UserWarning):
    """Some weights did not carry over. Its text is the report."""


class RebuildError(ValueError):
    """Some weights would not carry over, and `rebuild` was asked to be strict. Its text is the report.

    Attributes:
        carried: the report.
    """

    def __init__(self, carried: Carried) -> None:
        super().__init__(carried)
        self.carried = carried

    def __str__(self) -> str:
        return f"{self.carried}\nNothing was built; rebuild without strict=True initialises the other weights."


def rebuild(
    model: nn.Module, overrides: Sequence[str] = (), *, config: Source | None = None, strict: bool = False
) -> nn.Module:
    """Return a model built from a model's config with `overrides`, with the model's weights.

    Each weight (parameter or persistent buffer) that fits the new model is copied, see `components.carry_weights`. The
    others are initialised as by `build`. A `RebuildWarning` names them and the old weights that were not copied.
    `components.compare_weights` of the two models gives the same report.

    A new weight has the device and dtype of the old weight with its name, or else of the old model's first floating
    weight. A copied weight keeps its requires_grad. Modules keep train or eval mode by name. Hooks, gradients,
    adapters, wrappers and ties that the caller added are not copied. Make a new optimizer, since the old one holds the
    old parameters.

    A config holds values, not references: gpt_nano's feedforward.dropout comes from model.dropout, but an override of
    model.dropout does not change it.

    If some tensors are not copied, the new model is first built on the CPU. The state of torch's default generator is
    restored afterwards.

    Args:
        model: a model that `build` or `rebuild` returned; it is not changed.
        overrides: changes to its config, as for `compose`.
        config: the config of a model that `build` did not make, as for `compose`.
        strict: whether a weight that is not copied raises a RebuildError instead of a warning.

    Raises:
        TypeError, OSError, ValueError: as `compose` and `build`; or the model has no config, or only a part of it is on
            the meta device.
        RebuildError: with `strict`, some weights are not copied; the text is the report.

    >>> model = build("gpt_nano", ["feedforward=mlp", "fusion=off", "model.num_layers=1"])
    >>> fused = rebuild(model, ["feedforward=fused_mlp"], strict=True)
    >>> torch.equal(fused.blocks[0].feedforward.up.weight, model.blocks[0].feedforward.up.weight)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"rebuild takes a model, got a {type(model).__name__}; build(config) makes one")
    known = vars(model).get("built_from") if config is None else config
    if known is None:
        raise ValueError(
            f"this {type(model).__name__} has no config, since build did not make it; "
            "pass the model that build returned, not a wrapper or a submodule of it, or its config with config="
        )
    wanted = compose(known, overrides)
    before = _tensors(model)
    empty = [name for name, tensor in before.items() if tensor.is_meta]
    if 0 < len(empty) < len(before):
        raise ValueError(
            f"{empty[0]} is on the meta device, where there are no values, and other weights are not; load its values "
            'first, or rebuild model.to("meta")'
        )
    with torch.device("meta"):
        rebuilt = build(wanted)
    carried = compare_weights(model, rebuilt)
    if strict and not carried.complete:
        raise RebuildError(carried)
    # A tensor that is neither parameter nor buffer can only come from the constructor.
    loose = any(isinstance(value, Tensor) for module in rebuilt.modules() for value in vars(module).values())
    if not empty and (loose or _tensors(rebuilt).keys() != set(carried.carried)):
        with torch.device("cpu"), torch.random.fork_rng(devices=()):
            rebuilt = build(wanted)
    after = _tensors(rebuilt)
    first = next((tensor for tensor in before.values() if tensor.is_floating_point()), torch.empty(0))
    for name, tensor in after.items():
        like = before.get(name, first)
        dtype = like.dtype if tensor.is_floating_point() and like.is_floating_point() else tensor.dtype
        if tensor.is_meta:
            placed = torch.empty_like(tensor, device=like.device, dtype=dtype)
        else:
            placed = tensor.detach().to(device=like.device, dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
        # `tensor.data = placed` cannot leave the meta device. Swapped tensors keep their ties.
        torch.utils.swap_tensors(tensor, placed)  # type: ignore[no-untyped-call]
    carry_weights(model, rebuilt)
    for name in carried.carried:
        after[name].requires_grad_(before[name].requires_grad)
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in rebuilt.named_modules():
        module.train(modes.get(name, module.training))  # a new module has the mode of the module around it
    if not carried.complete:
        text = f"{carried}\nNew weights, and weights of another shape, are initialised."
        warnings.warn(text, RebuildWarning, stacklevel=2)
    return rebuilt


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer; a tied tensor has an entry for each of its names."""
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
