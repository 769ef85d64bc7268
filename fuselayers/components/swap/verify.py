"""Verification: a swapped module gives the numbers of the original one, and runs in training."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..._torch.dispatch import forked_rng, tree_map, tree_map_only
from ...errors import in_one_line
from ...ops.linear import onednn_wins
from ...partition.inspect.saved_bytes import Saved, saved_and_held, saved_by_call, tensors_of
from .batch import Call, as_call
from .cache import is_cache
from .loops import looped_size
from .report import Site, Skipped
from .rules import loss

_ALLOWED: Final = 2.0
"""The largest allowed ratio of a swapped module's error to that of the original, or to the dtype's rounding."""

_ROUNDINGS: Final = 16
"""The error, in units of the dtype's rounding, that the original is assumed to have at least: for blocks, where it
cannot run in float64, and where products run in oneDNN, whose sums of 4,096 terms have up to three times MKL's error.
Compiled code sums a bias's gradient over all rows one by one: its error is 3.4 roundings at 512 rows, 7.0 at 2048 and
21 at 8192, and eager's is 1.3 at each (a GPT-2 block of 64, float32, AMD EPYC)."""

_ROUNDINGS_OF_16_BITS: Final = 2
"""The same in float16 and bfloat16, whose rounding is 0.1 and 0.8 % of a value. Their sums are in float32."""

_COMPRESSED: Final = 0.05
"""The relative error that gradients are assumed to have at least if a block's saved values are compressed. Gradients of
few tokens in float8 have it."""


def inputs_of_sites(model: nn.Module, names: Iterable[str], batch: Any) -> dict[str, Call | str]:
    """Run the model once, in evaluation mode, and return each module's first arguments by name, or why there are none.

    Args:
        model: its modes and torch's random state do not change.
        names: qualified names of its modules.
        batch: the model's arguments: a mapping by name, a tuple by position, or one tensor.
    """
    names = list(names)
    calls: dict[str, Call | str] = dict.fromkeys(names, "the model does not call it on this batch")

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(calls[name], str):
            try:
                calls[name] = _copies((args, kwargs))
            except Exception as problem:  # such as an object that holds activations
                calls[name] = f"its arguments cannot be copied: {in_one_line(problem):.200}"

    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(functools.partial(keep, name), with_kwargs=True) for name in names]
    try:
        # With gradients enabled: a comparison needs the gradients of the inputs that backward reaches in the model.
        with torch.enable_grad(), _as_it_was(model):
            for module in model.modules():  # an exported module has no eval()
                module.training = False
            args, kwargs = as_call(batch)
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore the model's modes and buffers, and torch's random state, at the end."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # Forward may assign other buffers. A scripted module holds them in another type.
    named = [(own, dict(own)) for module in model.modules() if isinstance(own := module._buffers, dict)]
    try:
        with forked_rng():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        for current, before in named:
            current.clear()
            current.update(before)


def _copies(values: Any) -> Any:
    """Return copies of the values of a call, since a module may write into them."""
    return tree_map(_copied, values, is_leaf=is_cache)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    # A second call would read the first call's keys and values from a cache.
    return None if is_cache(value) else copy.deepcopy(value)


def check(site: Site, module: nn.Module, kind: Any, call: Call) -> Site | Skipped:
    """Compare results and gradients of the module with those of its new class, `kind`, and run a training step.

    The comparison is in evaluation mode, in which nothing is dropped. The reference is a copy in float64, or the
    original where that cannot run. For a causal loss the model is in training mode but its submodules are not, and
    there is no copy in float64. The module does not change. Returns the site with the measurements, and with the reason
    if it could not be verified; or the reason not to swap it.
    """
    is_loss = kind.rule == loss.NAME  # the module is the whole model, too large for a copy in float64
    try:
        original, swapped = (_sharing_parameters(module).eval() for _ in range(2))
        wide = None if is_loss else copy.deepcopy(module).eval()
    except Exception as problem:  # a module may hold an object that cannot be copied
        return replace(site, unverified=f"it cannot be copied: {in_one_line(problem):.200}")
    if not any(parameter.requires_grad for parameter in module.parameters()):  # a frozen model, or no weights
        call = with_gradients(call)
    swapped.__class__ = kind
    original.training = swapped.training = is_loss  # logits are left out only in training
    try:
        before = _run(original, call)
    except Exception as problem:
        return replace(site, unverified=f"a copy of the original raises {in_one_line(problem):.200}")
    is_block = kind.rule == "block"
    if is_block and (size := looped_size(original, _copies(call))):
        reason = f"its forward loops over {size} elements of an input: each size would need a graph of its own"
        return Skipped(site.name, site.kind, reason)
    try:
        after = _run(swapped, call)
    except Exception as problem:
        return Skipped(site.name, site.kind, f"it raises {in_one_line(problem):.200}")
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)
    roundings = _ROUNDINGS if dtype.itemsize > 2 else _ROUNDINGS_OF_16_BITS
    truth, least = before, roundings * torch.finfo(dtype).eps
    if wide is not None:
        with contextlib.suppress(Exception):  # some forwards insist on float32
            truth = _run(wide.double(), _floating(Tensor.double, call))
            least = torch.finfo(dtype).eps * (roundings if is_block or onednn_wins() else 1)
    of_results, of_gradients = _errors(after, truth)
    error_before, error = max(_errors(before, truth)), max(of_results, of_gradients)
    least = max(error_before, least)
    compresses = getattr(kind, "block_compress", None) is not None
    least_of_gradients = max(least, _COMPRESSED) if compresses else least
    if not (of_results <= _ALLOWED * least and of_gradients <= _ALLOWED * least_of_gradients):
        return Skipped(site.name, site.kind, f"its error is {error:.1e}, the original's {error_before:.1e}")
    if not math.isfinite(error_before):
        return replace(site, unverified="the original's results are not finite on this batch")
    site = replace(site, error=error, error_before=error_before)
    try:
        _run(original.train(), call)
    except Exception as problem:
        return replace(site, unverified=f"in training the original raises {in_one_line(problem):.200}")
    try:
        _run(swapped.train(), call)
    except Exception as problem:
        return Skipped(site.name, site.kind, f"in training it raises {in_one_line(problem):.200}")
    saved_before, saved_after = (_saved(copied, call) for copied in (original, swapped))
    if is_block:  # a function that Dynamo was told not to compile has no backend
        site = replace(site, backend=", ".join(kind.block_function.served_by) or "eager")
    return replace(site, saved_before=saved_before, saved_after=saved_after)


def _sharing_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of a module with the same parameters, which a comparison does not change."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _floating(change: Callable[[Tensor], Tensor], call: Call) -> Call:
    """Return the call with its floating tensors changed."""
    changed: Call = tree_map_only(Tensor, lambda value: change(value) if value.is_floating_point() else value, call)
    return changed


def with_gradients(call: Call) -> Call:
    """Return the call with all floating inputs requiring gradients, if none does."""
    if any(tensor.requires_grad for tensor in tensors_of(call)):
        return call
    return _floating(Tensor.requires_grad_, _copies(call))


def _run(module: nn.Module, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of a call, and the gradients."""
    leaves = _copies(call)
    inputs = [tensor for tensor in tensors_of(leaves) if tensor.requires_grad]
    with torch.enable_grad(), forked_rng():
        # A forward may write into its inputs, but autograd allows no write into a leaf.
        args, kwargs = tree_map_only(Tensor, Tensor.clone, leaves)
        result = module(*args, **kwargs)
        if isinstance(result, Mapping) and result.get("loss") is not None:
            result = result["loss"]
        results = [tensor for tensor in tensors_of(result) if tensor.is_floating_point()]
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results]
        total = sum((y * weight).sum() for y, weight in zip(results, weights, strict=True) if y.requires_grad)
        wanted = [*inputs, *(weight for weight in module.parameters() if weight.requires_grad)]
        gradients: Sequence[Tensor | None] = ()
        if isinstance(total, Tensor):
            gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    return [y.detach() for y in results], [torch.zeros(()) if dx is None else dx for dx in gradients]


def _errors(values: tuple[list[Tensor], list[Tensor]], truth: tuple[list[Tensor], list[Tensor]]) -> list[float]:
    """Return the largest error of the results in units of the largest result, and the same for the gradients.

    The unit is not each tensor's own largest value, since a gradient may be only rounding, as that of a key's bias is.
    """
    return [_error_of(computed, right) for computed, right in zip(values, truth, strict=True)]


def _error_of(values: list[Tensor], truth: list[Tensor]) -> float:
    if [value.shape for value in values] != [right.shape for right in truth]:
        return float("inf")
    errors = [
        _difference(value, right).abs().max().item()
        for value, right in zip(values, truth, strict=True)
        if value.numel()
    ]
    largest = max((right.abs().max().item() for right in truth if right.numel()), default=1.0)
    error = max(errors, default=0.0) / (largest or 1.0)
    return error if all(map(math.isfinite, errors)) else float("inf")


def _difference(value: Tensor, right: Tensor) -> Tensor:
    # In float32 as they are: copies of all gradients in float64 took 3 of the 12 s of `swap` for a GPT-2 of 12 layers.
    if value.dtype == right.dtype == torch.float32:
        return value - right
    return value.double() - right.double()


def saved_by_model(model: nn.Module, batch: Any) -> Saved | None:
    """Return what a call of the model saves in training mode; None if it does not run in that mode on this batch.

    The modes, the buffers and torch's random state are restored.
    """
    args, kwargs = as_call(batch)
    with torch.enable_grad(), _as_it_was(model):
        try:
            model.train()
            return saved_and_held(lambda: model(*args, **kwargs), exempt=(*model.parameters(), *model.buffers()))
        except Exception:  # the model's own error, such as for missing labels
            return None


def _saved(module: nn.Module, call: Call) -> int:
    """Return the bytes that hooks on saved tensors see.

    `saved_by_model` also searches for other live storages. That takes a second, too long for each module.
    """
    args, kwargs = tree_map_only(Tensor, Tensor.clone, _copies(call))
    with torch.enable_grad(), forked_rng():
        return saved_by_call(lambda: module(*args, **kwargs), exempt=(*module.parameters(), *module.buffers()))
