"""Whether a model computes the same values again, as activation checkpointing needs."""

from typing import Any

import torch
from torch import Tensor, nn

from .._torch.dispatch import pytree

__all__ = ["check_recompute"]


def check_recompute(model: nn.Module, *batch: Any, preserve_rng_state: bool = True, **named: Any) -> None:
    """Run forward, run it again as a checkpoint would, and name the first layer whose values differ.

    It holds the results of all layers twice. A parent counts after the layers inside it.

    Args:
        model: any module; call it within `ops.seeds` to check that.
        batch: the arguments of its forward; `named` are those by keyword.
        preserve_rng_state: whether the second run starts with the random numbers of the first, as in
            `torch.utils.checkpoint`.

    Raises:
        AssertionError: a value differs, or the second run calls other layers.

    >>> check_recompute(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.ones(4, 2))
    """
    devices = list({parameter.device for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices, enabled=preserve_rng_state):
        first = _results(model, batch, named)
    second = _results(model, batch, named)
    calls = [name for name, _ in first], [name for name, _ in second]
    assert calls[0] == calls[1], f"the second forward calls {calls[1]}, the first {calls[0]}"
    for (name, values), (_, again) in zip(first, second, strict=True):
        for place, (value, other) in enumerate(zip(values, again, strict=True)):
            same = value.shape == other.shape and bool(((value == other) | (value.isnan() & other.isnan())).all())
            assert same, f"{name or type(model).__name__} gives another result {place} in the second forward"


def _results(model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any]) -> list[tuple[str, list[Tensor]]]:
    results: list[tuple[str, list[Tensor]]] = []
    names = {module: name for name, module in model.named_modules()}

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        results.append((names[module], [tensor.detach().clone() for tensor in tensors]))

    hooks = [module.register_forward_hook(keep) for module in names]
    try:
        model(*batch, **named)
    finally:
        for hook in hooks:
            hook.remove()
    return results
