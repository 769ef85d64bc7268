"""Finds the layer where a step first stops being finite: the step runs again, without fusion, and is watched."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...partition import disable_fusion


class Finding(NamedTuple):
    """What went wrong, and when: a smaller one is earlier.

    Forward is pass 0, backward is pass 1, and layers and gradients are counted in each. Where nothing went wrong pass 2
    has the largest gradient, with its negative size as the number.
    """

    order: int
    number: float
    text: str


def first_not_finite(
    model: nn.Module,
    run: Callable[[], object],
    *,
    agreed: Callable[[Finding | None], Finding | None] | None = None,
) -> str:
    """Run a call of the model again and name the first layer, or the first gradient, that is not finite.

    Fused and compiled modules run as they were written, so that their inner layers can be watched. Gradients are set to
    None before and after; weights stay as they are.

    Args:
        model: its modules and parameters are watched.
        run: calls the model, and `backward` where gradients count, with the seeds of the call that went wrong.
        agreed: takes what this process found and returns the earliest finding of all, see `Processes.first_of`; None
            for one process.

    Returns:
        A clause for an error text.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> _ = nn.init.constant_(model[0].weight, float("nan"))
    >>> first_not_finite(model, lambda: model(torch.ones(1, 1)))
    'the first layer with an output that is not finite, from finite inputs, is 0 (Linear), whose weight is not finite'
    """
    watch = _Watch(model)
    handles: list[Any] = [
        module.register_forward_hook(partial(watch.after_forward, _clean(name)), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    handles += [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            partial(watch.after_gradient, _clean(name))
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    model.zero_grad(set_to_none=True)
    try:
        with disable_fusion(), torch.compiler.set_stance("force_eager"):
            run()
    except (RuntimeError, MemoryError) as error:
        if agreed is not None:  # the other processes wait for this one in the run
            raise
        # Layers that are not fused may need more memory than there is.
        return (
            watch.found.text
            if watch.found
            else f"the layer is not known, since the step cannot run again without fusion: {error}"
        )
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    found = watch.found or watch.largest_gradient()
    found = found if agreed is None else agreed(found)
    return found.text if found else "without fusion every layer's output is finite"


class _Watch:
    def __init__(self, model: nn.Module) -> None:
        self.found: Finding | None = None
        self._outputs = self._gradients = 0
        self._largest: tuple[float, str] | None = None

    def after_forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        self._outputs += 1
        # Inner layers end before outer ones: the first that is found is the innermost.
        if self.found is None and not _is_finite(output) and _is_finite((args, kwargs)):
            wrong = [own for own, parameter in module.named_parameters(recurse=False) if not _is_finite(parameter)]
            text = (
                "the first layer with an output that is not finite, from finite inputs, is "
                f"{name or 'the model itself'} ({type(module).__name__})"
                + (f", whose {' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite" if wrong else "")
            )
            self.found = Finding(0, self._outputs, text)

    def after_gradient(self, name: str, parameter: Tensor) -> None:
        self._gradients += 1
        if self.found is not None or parameter.grad is None:
            return
        if not _is_finite(parameter.grad):
            text = (
                "every layer's output is finite; the first gradient that is not, in the order of backward, is that of "
                f"{name}"
            )
            self.found = Finding(1, self._gradients, text)
            return
        (gradient,) = _floating(parameter.grad)
        if gradient.numel():
            self._largest = max(self._largest or (0.0, ""), (gradient.abs().max().item(), name))

    def largest_gradient(self) -> Finding | None:
        if self._largest is None:
            return None
        size, name = self._largest
        text = (
            f"without fusion every output and every gradient is finite; the largest gradient is {size:.2g}, of {name}"
        )
        return Finding(2, -size, text)


def _is_finite(value: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _floating(value))


def _floating(value: Any) -> Iterator[Tensor]:
    """The tensors of numbers in a value; of a DTensor this process's part, since the others may not ask for theirs."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield (value.to_local() if isinstance(value, DTensor) else value).detach()
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _floating(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _floating(entry)


def _clean(name: str) -> str:
    """The name without the part that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
