"""swap and unswap -- fused layers inside a model that exists."""

import fnmatch
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import nn

from ...names import no_such
from ...partition import backends, fuse
from ...partition.inspect.saved_bytes import tensors_of
from .batch import Call, made_batch
from .blocks import block_members, repeated_blocks, share_graphs, sizes_of
from .cache import hook_cache, unhook_cache
from .layer import cannot_swap, is_swapped, layer_members, swapped_class, unswap_class
from .report import Site, Skipped, SwapReport
from .rule import Match, Rule, unread
from .rules import RULES, loss
from .verify import check, inputs_of_sites, saved_by_model, with_gradients

_LEVELS: Final = ("auto", "layers", "blocks")
_IF_POSSIBLE: Final = "if_possible"


def swap(
    model: nn.Module,
    where: str | Sequence[str] = "*",
    *,
    rules: Sequence[Rule] | None = None,
    level: Literal["auto", "layers", "blocks"] = "auto",
    backend: str = "auto",
    compress: str | None = None,
    verify: bool | Literal["if_possible"] = True,
    batch: Any = None,
) -> SwapReport:
    """Put fused layers into a model, in place, wherever a rule fits one of its modules.

    Parameters, buffers and hooks stay the same objects. Names of modules and keys of the state_dict do not change. A
    swapped module gets a subclass of its class, with the same name. `unswap` restores the class.

    A rule recognises a class, or a forward regardless of its variables' names, in transformers and in your own code. In
    each call a swapped layer checks that the modules inside it have not changed. If one has (an adapter, a quantised
    layer, a hook, a sharded parameter), the original forward runs.

    From then on a model of transformers runs with `use_cache=False` in training, unless the caller passes `use_cache`,
    a cache, or `position_ids` without an `attention_mask`. In training with labels, a causal language model computes
    its loss without logits: the logits of its output are None.

    Args:
        model: any module.
        where: a pattern for the qualified names of modules to swap, such as `layers.1[0-9].*`, or several patterns.
        rules: the rules to apply; None for all shipped ones, `swap.RULES`.
        level: "layers" gives modules forwards that save less. "blocks" fuses each repeated block of the model (a
            decoder layer) with `fuse`, one function for all blocks of a class, and swaps layers outside the blocks.
            "auto" takes blocks, which save less than layers in every model that was measured. If a block is not
            verified, or blocks save nothing, it measures layers too, and takes the level that saves less. It takes
            layers if nothing can be verified, if `backend` is "eager" or Inductor cannot compile, or if blocks of a
            class have several widths, as in Swin, or several rates of stochastic depth, since each would be compiled
            separately.
        backend: of `fuse`, for blocks.
        compress: of `fuse`, only for level "blocks": "int8", "float8" or "bfloat16".
        verify: whether each module is compared with its original on inputs from `batch`, in evaluation mode, so that
            nothing is dropped (for a causal loss in training mode). Then it must run forward and backward in training
            mode. A module that the model does not call counts as verified if one of the same class and sizes is. A
            module is not swapped if it raises; if it is a block that loops over the elements of an input, since each
            size would need a graph of its own; or if its error is more than twice the larger of the original's error
            and the dtype's rounding (for blocks, and where float64 cannot run: 16 roundings, or 2 in 16 bits). With
            `compress`, gradients may err by up to 10 %. What cannot be verified is not swapped either; with
            "if_possible" it is. The report gives the reasons.
        batch: arguments of the model: a mapping by name, a tuple by position, or one tensor. The model runs on it in
            evaluation and in training mode; its modes and buffers are restored, other attributes that forward sets are
            not. None makes a batch from the config of a model of transformers.

    Warns:
        UserWarning: nothing was swapped; the text says why.

    Raises:
        TypeError: `model` is not a module, or `where` is not a pattern.
        ValueError: an unknown level, backend, compression or value of `verify`; compression at another level than
            "blocks"; or the model is swapped already.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    >>> report = swap(model, level="layers", batch=torch.randn(4, 8))
    >>> [(site.name, site.rule) for site in report.sites]
    [('', 'mlp'), ('2', 'dropout')]
    >>> unswap(model)
    2
    """
    _check_arguments(model, level, backend, compress, verify)
    search = _Search(model, _patterns_of(where), RULES if rules is None else tuple(rules), backend, compress)
    plans = [search.plan(name) for name in search.levels(level)]
    if verify:
        plan, report = _best(model, plans, batch, must_verify=verify != _IF_POSSIBLE)
    else:
        plan = plans[0]
        report = plan.report()
    plan.put_into(model)
    if report.sites:
        notes: list[str] = []
        if hook_cache(model):
            notes.append("in training the model runs with use_cache=False, unless its caller passes use_cache")
        if any(site.rule == loss.NAME for site in report.sites):
            notes.append("in training with labels the logits of the output are None")
        if level == "blocks" and report.level == "layers":
            notes.append(f"there are no repeated blocks: level layers{', nothing compressed' if compress else ''}")
        return replace(report, notes=(*notes, *report.notes))
    why = () if any(True for _ in search.modules()) else (f"no module matches where={where!r}",)
    matched = {module.name for module in report.skipped}
    unmatched = (module for module in search.why_nothing() if module.name not in matched)
    report = replace(report, skipped=(*report.skipped, *unmatched), notes=(*report.notes, *why))
    reasons = "\n".join(str(report).splitlines()[1:])
    warnings.warn(f"swap changed nothing in {type(model).__name__}\n{reasons}", stacklevel=2)
    return report


def _patterns_of(where: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (where,) if isinstance(where, str) else tuple(where)
    if isinstance(where, Mapping) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"where takes patterns of names, got {type(where).__name__}; arguments of the model go to batch="
        )
    return patterns


def _check_arguments(model: nn.Module, level: str, backend: str, compress: str | None, verify: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap takes a module, got {type(model).__name__}")
    if level not in _LEVELS:
        raise ValueError(no_such("level", level, _LEVELS))
    if verify not in (True, False, _IF_POSSIBLE):
        raise ValueError(f"verify must be True, False or {_IF_POSSIBLE!r}, got {verify!r}")
    if compress is not None and level != "blocks":
        raise ValueError(f"compress={compress!r} is for level='blocks', got level={level!r}; layers save exact values")
    fuse(backend=backend, compress=compress)  # raises for an unknown name
    if any(map(is_swapped, model.modules())):
        raise ValueError("this model is already swapped; call unswap(model) first")


def unswap(model: nn.Module) -> int:
    """Restore the original class of each swapped module; return how many there were."""
    unhook_cache(model)
    return sum(unswap_class(module) for module in model.modules())


@dataclass(frozen=True)
class _Plan:
    """The new classes of modules, by qualified name, and the modules that a rule matches but that cannot be swapped."""

    level: str
    kinds: dict[str, Any]
    skipped: list[Skipped]

    def report(self, *notes: str) -> SwapReport:
        """Return the report of the plan without verification."""
        sites = tuple(_site(name, kind) for name, kind in self.kinds.items())
        return SwapReport(self.level, sites, tuple(self.skipped), notes=notes)

    def unverified(self, why: str, advice: str, *, must_verify: bool) -> "tuple[_Plan, SwapReport]":
        """Return what is left of the plan if nothing can be verified, and its report."""
        if not must_verify:
            return self, self.report(f"not verified: {why}; {advice}")
        skipped = [Skipped(name, kind.__name__, f"not verified: {why}") for name, kind in self.kinds.items()]
        left = _Plan(self.level, {}, [*skipped, *self.skipped])
        return left, left.report(
            f"{advice}, or verify={_IF_POSSIBLE!r}, which swaps them without" if skipped else advice
        )

    def put_into(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for name, kind in self.kinds.items():
            modules[name].__class__ = kind


def _site(name: str, kind: Any) -> Site:
    return Site(name, kind.__name__, kind.rule, getattr(kind, "block_backend", ""))


@dataclass(frozen=True)
class _Search:
    """A search for sites in a model."""

    model: nn.Module
    patterns: tuple[str, ...]
    rules: tuple[Rule, ...]
    backend: str
    compress: str | None

    def levels(self, level: str) -> tuple[str, ...]:
        """Return the levels to try, in order. With `verify=False` the first one is taken."""
        if level != "auto":
            return (level,)
        # Blocks that differ share no graph, and compiling each of them takes too long for a default. Blocks of
        # the eager backend save more than layers: GPT-2 keeps 0.79 of its bytes, with layers 0.38.
        compiles = self.backend != "eager" and _inductor_compiles(self.model)
        tries_blocks = compiles and share_graphs([block for _, block in self._blocks()])
        return ("blocks", "layers") if tries_blocks else ("layers",)

    def plan(self, level: str) -> _Plan:
        blocks = dict(self._blocks()) if level == "blocks" else {}
        kinds: dict[str, Any] = {
            name: swapped_class(type(block), block_members, self.backend, self.compress, sizes_of(block))
            for name, block in blocks.items()
        }
        skipped: list[Skipped] = []
        for name, module in self.modules():
            if any(name == block or name.startswith(f"{block}.") for block in blocks):
                continue  # the compiler handles the inside of a block
            for rule in self.rules:
                match = rule.match(module)
                reason = match if isinstance(match, str) else cannot_swap(module) if match else None
                if reason is not None:
                    skipped.append(Skipped(name, type(module).__name__, reason))
                elif isinstance(match, Match):
                    kinds[name] = swapped_class(type(module), layer_members, rule, match)
                    break
        skipped = [module for module in dict.fromkeys(skipped) if module.name not in kinds]
        return _Plan("blocks" if blocks else "layers", kinds, skipped)

    def why_nothing(self) -> list[Skipped]:
        """Return why no rule fits, for one module of each class that computes something."""
        reasons: dict[type, Skipped] = {}
        for name, module in self.modules():
            computes = any(isinstance(child, nn.Linear) for child in module.children())
            is_of_torch = type(module).__module__.startswith("torch.")
            own = any(True for _ in module.parameters(recurse=False)) and not is_of_torch
            if (computes or own) and not isinstance(module, (nn.Sequential, nn.ModuleList)):
                reasons.setdefault(type(module), Skipped(name, type(module).__name__, unread(module)))
        return list(reasons.values())

    def _blocks(self) -> Iterator[tuple[str, nn.Module]]:
        for name, block in repeated_blocks(self.model):
            if self._matches(name) and cannot_swap(block) is None:
                yield name, block

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the modules that match the patterns, by qualified name."""
        return (
            (name, module)
            for name, module in self.model.named_modules()
            if self._matches(name) and not isinstance(module, torch.jit.ScriptModule)
        )

    def _matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


def _inductor_compiles(model: nn.Module) -> bool:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return any(status.available for status in backends(device=device) if status.name == "inductor")


def _best(model: nn.Module, plans: Sequence[_Plan], batch: Any, *, must_verify: bool) -> tuple[_Plan, SwapReport]:
    """Return the plan that saves most, without the modules that failed verification, and its report.

    Blocks come first. Layers are tried only if a module failed, or if blocks save nothing. If nothing can be verified,
    return the last plan: layers, not blocks. If all must be verified, nothing is left of it.
    """
    is_made = batch is None
    batch = made_batch(model) if is_made else batch
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if batch is None or on_meta:
        why = "its parameters are on the meta device" if on_meta else "there is no batch, and none could be made"
        advice = "give it values" if on_meta else "give batch="
        return plans[-1].unverified(why, advice, must_verify=must_verify)
    before = saved_by_model(model, batch)
    saved_before = None if before is None else before.total
    results: list[tuple[_Plan, SwapReport]] = []
    for plan in plans:
        try:
            calls = inputs_of_sites(model, plan.kinds, batch)
        except Exception as problem:
            if not is_made:
                raise
            why = f"the model does not run on a batch made from its config ({problem!s:.100})"
            return plans[-1].unverified(why, "give batch=", must_verify=must_verify)
        left, report = _verified(model, plan, calls, batch, must_verify=must_verify)
        results.append((left, report))
        if left.kinds == plan.kinds and (saved_before is None or (report.saved_after or 0) < saved_before):
            break
    left, report = min(results, key=lambda result: (not result[1].sites, result[1].saved_after or 0))
    others = (module for _, other in results for module in other.skipped if module not in report.skipped)
    failed = tuple(module for module in others if module.name not in left.kinds)
    report = replace(report, skipped=(*failed, *report.skipped), saved_before=saved_before)
    if report.sites and saved_before is not None and (report.saved_after or 0) >= saved_before:
        report = replace(report, notes=(*report.notes, "it saves nothing on this batch"))
    return left, report


def _verified(
    model: nn.Module, plan: _Plan, calls: Mapping[str, Call | str], batch: Any, *, must_verify: bool
) -> tuple[_Plan, SwapReport]:
    """Return the plan without the modules that fail, and its report with measurements. The model does not change."""
    modules = dict(model.named_modules())
    results: dict[str, Site | Skipped] = {}
    # By class and sizes. Equal blocks share a graph, so one of them is compared. A module that the model does not call
    # takes the result of an equal one.
    seen: dict[Hashable, Site | Skipped] = {}
    # If inputs of one of the blocks require gradients, so do those of the comparison.
    trained = {plan.kinds[name] for name, call in calls.items() if any(part.requires_grad for part in tensors_of(call))}
    for name, kind in plan.kinds.items():
        call, key = calls[name], (kind, sizes_of(modules[name]))
        if not isinstance(call, str) and not (kind.rule == "block" and key in seen):
            call = with_gradients(call) if kind.rule == "block" and kind in trained else call
            seen[key] = results[name] = check(_site(name, kind), modules[name], kind, call)
    for name, kind in plan.kinds.items():
        if name not in results:
            call = calls[name]
            site = replace(_site(name, kind), unverified=call if isinstance(call, str) else "")
            results[name] = replace(seen.get((kind, sizes_of(modules[name])), site), name=name)
    sites: list[Site] = []
    skipped = list(plan.skipped)
    for name in plan.kinds:
        result = results[name]
        if isinstance(result, Site) and result.unverified and must_verify:
            result = Skipped(name, result.kind, f"not verified: {result.unverified}")
        if isinstance(result, Skipped):
            skipped.append(result)
        else:
            sites.append(result)
    left = _Plan(plan.level, {site.name: plan.kinds[site.name] for site in sites}, skipped)
    try:
        left.put_into(model)
        hook_cache(model)
        after = saved_by_model(model, batch)
    finally:
        unswap(model)
    notes: tuple[str, ...] = ()
    if must_verify and any(isinstance(result, Site) and result.unverified for result in results.values()):
        notes = (f"verify={_IF_POSSIBLE!r} swaps what could not be verified",)
    report = SwapReport(plan.level, tuple(sites), tuple(skipped), notes=notes)
    if after is None:
        return left, report
    return left, replace(report, saved_after=after.total, held_after=after.held)
