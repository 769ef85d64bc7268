"""Backends by name: which there are, which work here, and what happens when the one asked for does not."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from ..names import no_such
from .compilers import (
    compile_eager,
    compile_inductor,
    compile_nvfuser,
    nvfuser_hint,
    why_inductor_is_unavailable,
    why_nvfuser_is_unavailable,
)
from .fallback_warning import FallbackWarning
from .joint_graph import PartitionError
from .partitioners import Partitioner
from .torch_private import BackendCompilerFailed, TorchDynamoException, copy_of

__all__ = ["BackendStatus", "BackendUnavailableError", "FallbackWarning", "backends", "check_backends", "compile_chain"]

# Inductor is what writes Triton; under that name it is asked for on a GPU or not at all.
_COMPILERS: Final = MappingProxyType(
    {"eager": compile_eager, "inductor": compile_inductor, "triton": compile_inductor, "nvfuser": compile_nvfuser}
)
_NAMES: Final = ("auto", *_COMPILERS)
_AUTO_ORDER: Final = ("inductor", "eager")


class BackendUnavailableError(RuntimeError):
    """The backend that was asked for does not work here, and there is no fallback left."""


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
    missing, without_triton = (_why_unavailable(name, {device_type}) for name in ("inductor", "triton"))
    without_nvfuser = _why_unavailable("nvfuser", {device_type})
    serving = "inductor" if missing is None else "eager"
    hint = "apt install g++" if device_type == "cpu" else "pip install triton"
    return (
        BackendStatus("auto", True, f"the first that works of {', '.join(_AUTO_ORDER)}: here {serving}", ""),
        BackendStatus("eager", True, "runs the partitioned graphs op by op", ""),
        BackendStatus(
            "inductor",
            missing is None,
            missing or f"compiles to {'C++' if device_type == 'cpu' else 'Triton'}",
            "" if missing is None else hint,
        ),
        BackendStatus(
            "triton",
            without_triton is None,
            without_triton or "Inductor, which compiles to Triton",
            "pip install triton" if without_triton is not None and device_type != "cpu" else "",
        ),
        BackendStatus(
            "nvfuser",
            without_nvfuser is None,
            without_nvfuser or "nvFuser runs what can be fused, and torch the rest",
            nvfuser_hint() if without_nvfuser is not None and device_type != "cpu" else "",
        ),
    )


def check_backends(backend: str, fallback: Sequence[str]) -> tuple[str, ...]:
    """Return the compilers to try, in order.

    Raises:
        ValueError: a name is unknown; the message lists what there is.
        TypeError: `fallback` is one string instead of a sequence of them.
    """
    if isinstance(fallback, str):
        raise TypeError(f"fallback must be a sequence of backends, got the string {fallback!r}; write ({fallback!r},)")
    for name in (backend, *fallback):
        if name not in _NAMES:
            raise ValueError(no_such("backend", name, _NAMES))
    chain: list[str] = []
    for name in (backend, *fallback):
        chain += _AUTO_ORDER if name == "auto" else (name,)
    return tuple(dict.fromkeys(chain))


def compile_chain(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    chain: Sequence[str],
    partition: str | Partitioner,
    torch_random: bool,
    served: Callable[[str], None],
) -> Callable[..., Any]:
    """Compile a graph with the first backend of `chain` that can, and tell `served` its name.

    A backend serves the whole graph or nothing of it: each attempt starts from an untouched copy.

    Raises:
        BackendUnavailableError: every backend of the chain failed; the message says why each did.
    """
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)} or {"cpu"}
    failures: list[tuple[str, str]] = []
    cause: Exception | None = None
    for place, name in enumerate(chain):
        reason = _why_unavailable(name, devices)
        if reason is None:
            attempt = graph_module if place == len(chain) - 1 else copy_of(graph_module)
            try:
                compiled = _COMPILERS[name](attempt, example_inputs, partition=partition, torch_random=torch_random)
            except Exception as error:
                # Inductor wraps what went wrong in it in Dynamo's own kind of error.
                wrapped = isinstance(error, BackendCompilerFailed)
                cause = getattr(error, "inner_exception", error) if wrapped else error
                if isinstance(cause, TorchDynamoException | PartitionError):
                    raise  # how Dynamo restarts its own analysis; a graph that no backend can cut as asked
                reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"
            else:
                for failed, why in failures:
                    _say_once(failed, why, name)
                served(name)
                return compiled
        failures.append((name, reason))
    said = "; ".join(f"{name}: {why}" for name, why in failures)
    raise BackendUnavailableError(
        f"no backend could compile this function ({said}); mend the cause, or allow fallback=('eager',)"
    ) from cause


def _why_unavailable(name: str, device_types: set[str]) -> str | None:
    if name == "eager":
        return None
    if name == "triton" and device_types == {"cpu"}:
        return "Triton compiles for GPUs, and this runs on a CPU"
    why = why_nvfuser_is_unavailable if name == "nvfuser" else why_inductor_is_unavailable
    for device_type in sorted(device_types):
        reason = why(device_type)
        if reason is not None:
            return reason
    return None


_said: set[tuple[str, str, str]] = set()


def _say_once(failed: str, why: str, name: str) -> None:
    if (failed, why, name) not in _said:
        _said.add((failed, why, name))
        warnings.warn(f"backend {failed!r} is not used: {why}; {name!r} serves instead", FallbackWarning, stacklevel=2)
