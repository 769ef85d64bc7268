"""Backends by name: a table, which of them work here, and the chain of fallbacks."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from .._torch.guards import inner_error, is_error_of_dynamo
from .._torch.tracing import copy_of
from ..errors import BackendUnavailableError, say_once
from ..names import no_such
from .compilers import (
    compile_eager,
    compile_inductor,
    compile_nvfuser,
    compile_triton,
    nvfuser_hint,
    why_inductor_is_unavailable,
    why_nvfuser_is_unavailable,
)
from .joint_graph import PartitionError
from .partitioners import Partitioner
from .report import GraphReport, ServedGraph

_COMPILERS: Final = MappingProxyType(
    {"eager": compile_eager, "inductor": compile_inductor, "triton": compile_triton, "nvfuser": compile_nvfuser}
)
_NAMES: Final = ("auto", *_COMPILERS)
_PINNED: Final = "pinned:"
_GET_TRITON: Final = "pip install triton"

AUTO_ORDER: Final = ("inductor", "eager")
"""The backends that "auto" begins with: the first that works."""

CANDIDATES: Final = ("inductor", "triton", "nvfuser", "eager")
"""The backends that "auto" measures, in the order in which it settles ties; "triton" where the graph has own ops."""

PLAIN: Final = "plain"
"""The graph as it was traced, op by op: no backend, but "auto" and a pinned choice may take it."""


@dataclass(frozen=True)
class BackendStatus:
    """One backend on this machine.

    Attributes:
        name: as `fuse(backend=...)` takes it.
        available: True if it compiles for the device looked at.
        reason: what it is, or why it does not work here.
        hint: the command or setting that would make it available, or "".
    """

    name: str
    available: bool
    reason: str
    hint: str


def backends(*, device: torch.device | str = "cpu") -> tuple[BackendStatus, ...]:
    """Return every backend with whether it works for `device`, and why not.

    >>> [status.name for status in backends()]
    ['auto', 'eager', 'inductor', 'triton', 'nvfuser']
    """
    device_type = torch.device(device).type
    on_cpu = device_type == "cpu"
    described = {
        "inductor": (f"compiles to {'C++' if on_cpu else 'Triton'}", "apt install g++" if on_cpu else _GET_TRITON),
        "triton": ("Inductor, with this library's kernels", "" if on_cpu else _GET_TRITON),
        "nvfuser": ("nvFuser runs what can be fused, and torch the rest", nvfuser_hint()),
    }
    missing = {name: why_unavailable(name, {device_type}) for name in described}
    first = "inductor" if missing["inductor"] is None else "eager"
    return (
        BackendStatus("auto", True, f"begins with {first}, measures, and takes the fastest", ""),
        BackendStatus("eager", True, "runs the partitioned graphs op by op", ""),
        *(
            BackendStatus(name, True, text, "") if why is None else BackendStatus(name, False, why, hint)
            for (name, why), (text, hint) in zip(missing.items(), described.values(), strict=True)
        ),
    )


def check_backends(backend: str, fallback: Sequence[str]) -> tuple[str, ...]:
    """Return the compilers to try, in order; for "auto" those that it begins with, for a pinned choice its first and
    then the fallbacks.

    Raises:
        ValueError: a name is unknown, or a pinned choice cannot be read; the message lists what there is.
        TypeError: `backend` is no string, or `fallback` is one string instead of a sequence of them, or None.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name, got {backend!r}; leave it out for 'auto', or write 'eager'")
    if fallback is None:
        raise TypeError("fallback must be a sequence of backends, got None; write () for none")
    if isinstance(fallback, str):
        raise TypeError(f"fallback must be a sequence of backends, got the string {fallback!r}; write ({fallback!r},)")
    pinned = backend.startswith(_PINNED)
    chain: list[str] = []
    for name in fallback if pinned else (backend, *fallback):
        if name not in _NAMES:
            raise ValueError(no_such("backend", name, _NAMES))
        chain += AUTO_ORDER if name == "auto" else (name,)
    others = tuple(dict.fromkeys(chain))
    # The backend that is pinned for most graphs is no fallback of the others, unless it is named as one.
    return (pinned_choices(backend)[""], *others) if pinned else others


def pinned_choices(backend: str) -> dict[str, str]:
    """Return graph -> backend of a pinned choice; "" stands for all other graphs.

    Raises:
        ValueError: it cannot be read. "pinned:inductor+3f2a91b0:plain" takes Inductor, but does not fuse one graph.

    >>> pinned_choices("pinned:inductor+3f2a91b0:plain")
    {'': 'inductor', '3f2a91b0': 'plain'}
    """
    others, *single = backend.removeprefix(_PINNED).split("+")
    known = tuple(_COMPILERS)
    if others not in known:
        raise ValueError(f"a pinned choice begins with the backend of most graphs: {no_such('backend', others, known)}")
    choices = {"": others}
    for entry in single:
        identity, colon, name = entry.partition(":")
        if not (colon and re.fullmatch("[0-9a-f]{8}", identity)):
            raise ValueError(
                f"a pinned choice names a graph as in 3f2a91b0:eager, got {entry!r}; `fuselayers tune` writes them"
            )
        if name not in (*known, PLAIN):
            raise ValueError(no_such("backend", name, (*known, PLAIN)))
        choices[identity] = name
    return choices


def device_types_of(values: Sequence[Any]) -> set[str]:
    """Return the types of the devices of all tensors among the values; {"cpu"} if there is no tensor."""
    return {value.device.type for value in values if isinstance(value, torch.Tensor)} or {"cpu"}


def main_device(values: Sequence[Any]) -> str:
    """Return the type of the device that does the work: a GPU, if any of the tensors is on one."""
    return next(iter(sorted(device_types_of(values) - {"cpu"})), "cpu")


def compile_chain(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    chain: Sequence[str],
    report: GraphReport,
    partition: str | Partitioner,
    torch_random: bool,
) -> tuple[Callable[..., Any], ServedGraph]:
    """Compile a graph with the first backend of `chain` that can, and complete its report.

    One backend compiles the whole graph: each attempt starts from an untouched copy.

    Raises:
        BackendUnavailableError: every backend of the chain failed; the message says why each did.
    """
    devices = device_types_of(example_inputs)
    failures: list[tuple[str, str]] = []
    cause: Exception | None = None
    for index, name in enumerate(chain):
        reason = why_unavailable(name, devices)
        if reason is None:
            attempt = graph_module if index == len(chain) - 1 else copy_of(graph_module)
            try:
                compiled = _COMPILERS[name](attempt, example_inputs, partition=partition, torch_random=torch_random)
            except Exception as error:
                cause = inner_error(error)
                if isinstance(cause, PartitionError) or is_error_of_dynamo(cause):
                    raise  # no backend can trace this graph, or cut it as asked
                reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"
            else:
                for failed, why in failures:
                    say_once(f"backend {failed!r} is not used: {why}; {name!r} serves instead")
                why_this = "; ".join(f"since {failed} is not used: {why}" for failed, why in failures)
                return compiled, ServedGraph(
                    replace(report, served_by=name, reason=why_this or report.reason or "the first that works")
                )
        failures.append((name, reason))
    said = "; ".join(f"{name}: {why}" for name, why in failures)
    # Eager compiles nothing: where it fails, another compiler is no help.
    advice = "mend the cause" + (
        " in the function or its partitioner" if "eager" in chain else ", or allow fallback=('eager',)"
    )
    raise BackendUnavailableError(f"no backend could compile this function ({said}); {advice}") from cause


def why_unavailable(name: str, device_types: set[str]) -> str | None:
    """Return None if the backend compiles for all of these kinds of devices, else what is missing."""
    if name == "eager":
        return None
    if name == "triton" and device_types == {"cpu"}:
        return "Triton compiles for GPUs, and this runs on a CPU"
    why = why_nvfuser_is_unavailable if name == "nvfuser" else why_inductor_is_unavailable
    return next((reason for one in sorted(device_types) if (reason := why(one)) is not None), None)
