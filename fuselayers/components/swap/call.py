"""swap and unswap -- fused layers inside a model that exists."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
from torch import nn

from ...names import no_such
from ...partition import backends
from .blocks import block_class, repeated_blocks
from .report import Site, Skipped, SwapReport
from .rules import Rule
from .sharded import as_in_forward
from .shipped import RULES
from .sites import is_swapped, layer_class, unswap_class
from .verify import check, inputs_of_sites, saved_by_model, tensors_of, with_gradients

__all__ = ["swap", "unswap"]

_LEVELS: Final = ("auto", "layers", "blocks")


def swap(
    model: nn.Module,
    where: str | Sequence[str] = "*",
    *,
    rules: Sequence[Rule] | None = None,
    level: Literal["auto", "layers", "blocks"] = "auto",
    backend: str = "auto",
    verify: bool = True,
    batch: Any = None,
    timed: bool = False,
) -> SwapReport:
    """Put fused layers into a model, in place, wherever its modules compute what can be fused.

    Parameters, buffers, hooks, names of modules and keys of the state_dict stay the same objects. A swapped module gets
    a subclass of its own class, of the same name. `unswap` takes it back.

    What a module computes is read from the source of its forward, so a model of any library will do, and one's own.
    In each call a swapped layer looks whether the modules inside it are still what they were. Where one is not (an
    adapter, a quantised layer, a hook, a sharded parameter) the original forward runs.

    Args:
        model: any module.
        where: only modules whose qualified name matches this pattern, or one of these: `layers.1[0-9].*`.
        rules: what to look for; None for all that are shipped, `swap.RULES`.
        level: "layers" replaces parts of forwards by this library's functions. "blocks" sends each repeated block of
            the model (a decoder layer) through `fuse`, all blocks of a class as one function, and replaces parts
            of what is outside of them. "auto" is "blocks" where Inductor can compile and there are blocks.
        backend: of `fuse`, for blocks.
        verify: whether each module is compared with its original, on inputs from `batch`, in evaluation mode, so that
            nothing is dropped; a causal loss in training mode. It stays as it is if it raises, or if its error is more
            than twice the original's and the dtype's rounding.
        batch: arguments of the model, which runs once in evaluation mode; its buffers are put back then. A mapping by
            name, a tuple by position, or one tensor. None takes the
            `dummy_inputs` that models of transformers have. Sites that no inputs reach are "not verified" in the
            report.
        timed: whether each module that is verified is timed too, before and after, five times each.

    Raises:
        TypeError: `model` is not a module.
        ValueError: there is no such level, or a model that is swapped already.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    >>> report = swap(model, level="layers", batch=torch.randn(4, 8))
    >>> [(site.name, site.rules) for site in report.sites]
    [('', ('mlp',)), ('2', ('dropout',))]
    >>> unswap(model)
    2
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap takes a module, got {type(model).__name__}")
    if level not in _LEVELS:
        raise ValueError(no_such("level", level, _LEVELS))
    if any(map(is_swapped, model.modules())):
        raise ValueError("this model is swapped already; call unswap(model) first")
    patterns = (where,) if isinstance(where, str) else tuple(where)
    chosen = RULES if rules is None else tuple(rules)
    blocks = [] if level == "layers" else [one for one in repeated_blocks(model) if _matches(one[0], patterns)]
    if level == "auto" and not (blocks and _inductor_compiles(model)):
        blocks = []
    kinds = {name: block_class(type(block), backend) for name, block in blocks}  # type: ignore[arg-type]
    for name, module in as_in_forward(model).named_modules():
        if _matches(name, patterns) and name not in kinds:
            inside = any(name.startswith(f"{block}.") for block, _ in blocks)
            # A compiler decides by itself about the rest of a block.
            kind = layer_class(module, tuple(rule for rule in chosen if rule.one_op) if inside else chosen)
            if kind is not None:
                kinds[name] = kind
    report = SwapReport("blocks" if blocks else "layers", (), ())
    return _checked(model, kinds, report, batch, timed) if verify else _swapped(model, kinds, report)


def _inductor_compiles(model: nn.Module) -> bool:
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return any(status.available for status in backends(device=device) if status.name == "inductor")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def unswap(model: nn.Module) -> int:
    """Give each swapped module of the model its own class back; return how many there were."""
    return sum(unswap_class(module) for module in model.modules())


def _swapped(model: nn.Module, kinds: Mapping[str, type], report: SwapReport) -> SwapReport:
    modules = dict(model.named_modules())
    for name, kind in kinds.items():
        modules[name].__class__ = kind
    return replace(report, sites=tuple(_site(name, kind) for name, kind in kinds.items()))


def _site(name: str, kind: Any) -> Site:
    if not kind.found:
        return Site(name, kind.__name__, ("block",), kind.block_backend)
    return Site(name, kind.__name__, tuple(name for name, _ in kind.found))


def _checked(model: nn.Module, kinds: Mapping[str, type], report: SwapReport, batch: Any, timed: bool) -> SwapReport:
    batch = getattr(model, "dummy_inputs", None) if batch is None else batch
    calls = {} if batch is None else inputs_of_sites(model, kinds, batch)
    modules = dict(model.named_modules())
    sites: list[tuple[Site, type]] = []
    skipped: list[Skipped] = []
    seen: dict[type, Site | Skipped] = {}
    # Of blocks that share a graph one is compared: with gradients of its inputs, if any of them has such inputs.
    trained = {kinds[name] for name, call in calls.items() if any(one.requires_grad for one in tensors_of(call))}
    for name, kind in kinds.items():
        site = _site(name, kind)
        found: Site | Skipped = site
        if name in calls:
            is_block = site.rules == ("block",)
            if not is_block or kind not in seen:  # one graph serves all blocks
                call = with_gradients(calls[name]) if is_block and kind in trained else calls[name]
                seen[kind] = check(site, modules[name], kind, call, timed=timed)
            found = replace(seen[kind], name=name)
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            sites.append((found, kind))
    before = None if batch is None else saved_by_model(model, batch)
    for site, kind in sites:
        modules[site.name].__class__ = kind
    after = None if before is None else saved_by_model(model, batch)
    return replace(
        report,
        sites=tuple(site for site, _ in sites),
        skipped=tuple(skipped),
        saved_before=before,
        saved_after=after,
    )
