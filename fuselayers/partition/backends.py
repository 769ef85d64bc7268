"""Backends by name: a table, which of them work here, and the chain of fallbacks."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from .._torch.guards import inner_error, is_error_of_dynamo, unfit_torch
from .._torch.tracing import copy_of
from ..errors import BackendUnavailableError, in_one_line, warn_once
from ..names import no_such
from ..ops.implementations.dispatch import BACKENDS as OP_BACKENDS
from .choose.partitioners import Partitioner
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

COMPILERS: Final[Mapping[str, Callable[..., Callable[..., Any]]]] = MappingProxyType(
    {"eager": compile_eager, "inductor": compile_inductor, "triton": compile_triton, "nvfuser": compile_nvfuser}
)
WITH_CUDA_GRAPHS: Final = ("inductor", "triton")
_NAMES: Final = ("auto", *COMPILERS)
_SECONDS: Final = 3.0  # a compilation that takes longer logs a warning, the first time in a process
_warned_of_wait: Final = threading.Event()
_GET_TRITON: Final = "pip install triton"

_AUTO: Final = ("inductor", "eager")
# The kernels of the ops move some 0.6 of the bytes of Inductor's code for a block (docs/gpu_checks.md, the ledger).
_AUTO_ON_A_GPU: Final = ("triton", *_AUTO)


@dataclass(frozen=True)
class BackendStatus:
    """One backend on this machine.

    Attributes:
        name: as `fuse(backend=...)` takes it.
        available: True if it compiles for the device that was asked about.
        reason: a description, or why it does not work here.
        hint: the command or setting that would make it available, or "".
    """

    name: str
    available: bool
    reason: str
    hint: str


def backends(*, device: torch.device | str = "cpu") -> tuple[BackendStatus, ...]:
    """Return every backend, whether it works for `device`, and if not, why.

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
    missing = {name: _why_unavailable(name, {device_type}) for name in described}
    chain = expanded(("auto",), {device_type})
    first = next(name for name in chain if missing.get(name) is None)
    of_chain = f"{', '.join(chain[:-1])} and {chain[-1]}"
    return (
        BackendStatus("auto", True, f"takes {first}, the first of {of_chain} that works", ""),
        BackendStatus("eager", True, "runs the partitioned graphs op by op", ""),
        *(
            BackendStatus(name, True, text, "") if why is None else BackendStatus(name, False, why, hint)
            for (name, why), (text, hint) in zip(missing.items(), described.values(), strict=True)
        ),
    )


def check_backends(backend: str, fallback: Sequence[str]) -> tuple[str, ...]:
    """Return the backends to try, in order; "auto" stands for those of the graph's device, see `expanded`.

    Raises:
        ValueError: a name is unknown; the message lists what there is.
        TypeError: `backend` is not a string, or `fallback` is a string or None instead of a sequence of names.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {backend!r}; leave it out for 'auto', or write 'eager'")
    if fallback is None:
        raise TypeError("fallback must be a sequence of backends, got None; write () for none")
    if isinstance(fallback, str):
        raise TypeError(f"fallback must be a sequence of backends, got the string {fallback!r}; write ({fallback!r},)")
    chain: list[str] = []
    for name in (backend, *fallback):
        if name not in _NAMES:
            advice = "; an op takes it: ops.dropout(x, 0.1, backend=...)" if name in OP_BACKENDS else ""
            raise ValueError(no_such("backend", name, _NAMES) + advice)
        chain.append(name)
    return tuple(dict.fromkeys(chain))


def expanded(chain: Sequence[str], device_types: Collection[str]) -> tuple[str, ...]:
    """Return the compilers to try for a graph on these device types, in order.

    >>> expanded(("auto",), {"cpu"}), expanded(("auto", "eager"), {"cuda"})
    (('inductor', 'eager'), ('triton', 'inductor', 'eager'))
    """
    auto = _AUTO_ON_A_GPU if "cuda" in device_types else _AUTO
    names = (name for listed in chain for name in (auto if listed == "auto" else (listed,)))
    return tuple(dict.fromkeys(names))


def compile_chain(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    chain: Sequence[str],
    partition: Partitioner,
    torch_random: bool,
    cuda_graphs: bool = False,
) -> tuple[Callable[..., Any], str, str]:
    """Compile a graph with the first backend of `chain` that can.

    Return the compiled graph, the backend, and why the backends before it failed. One backend compiles the whole graph:
    each attempt starts from an untouched copy.

    Raises:
        BackendUnavailableError: every backend of the chain failed; the message says why each did. Or one failed since
            this library does not fit this torch.
    """
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    devices = {tensor.device.type for tensor in tensors} or {"cpu"}
    chain = expanded(chain, devices)
    failures: list[tuple[str, str]] = []
    cause: Exception | None = None
    for index, name in enumerate(chain):
        reason = _why_unavailable(name, devices)
        if reason is None:
            options = {"cuda_graphs": True} if cuda_graphs and name in WITH_CUDA_GRAPHS and "cuda" in devices else {}
            if cuda_graphs and not options:
                where = f"the backend {name!r}" if "cuda" in devices else "a CPU"
                warn_once(f"cuda_graphs=True captures nothing on {where}; it needs a GPU, and triton or inductor")
            attempt = graph_module if index == len(chain) - 1 else copy_of(graph_module)
            try:
                with _warning_when_slow(name, len(graph_module.graph.nodes)):
                    compiled = COMPILERS[name](
                        attempt, example_inputs, partition=partition, torch_random=torch_random, **options
                    )
            except Exception as error:
                cause = inner_error(error)
                if isinstance(cause, PartitionError) or is_error_of_dynamo(cause):
                    raise  # no backend can trace this graph, or cut it as asked
                if (unfit := unfit_torch(cause)) is not None:
                    # A fallback would run another backend from now on, for a fault that is not the user's.
                    raise BackendUnavailableError(
                        f"this version of fuselayers does not fit torch {torch.__version__}, whose private names have "
                        f"changed: {unfit}; install versions that fit, or name another backend than {name!r}"
                    ) from cause
                reason = in_one_line(cause)
            else:
                for failed, why in failures:
                    warn_once(f"backend {failed!r} is not used: {why}; {name!r} is used instead")
                return compiled, name, "; ".join(f"since {failed} is not used: {why}" for failed, why in failures)
        failures.append((name, reason))
    said = "; ".join(f"{name}: {why}" for name, why in failures)
    # Eager compiles nothing: where it fails, another compiler fails too.
    advice = "fix the cause" + (
        " in the function or its partitioner" if "eager" in chain else ", or allow fallback=('eager',)"
    )
    raise BackendUnavailableError(f"no backend could compile this function ({said}); {advice}") from cause


@contextmanager
def _warning_when_slow(backend: str, num_nodes: int) -> Iterator[None]:
    def warn() -> None:
        if _warned_of_wait.is_set():
            return
        _warned_of_wait.set()
        logging.getLogger("fuselayers").warning(
            "%s %s a graph of %d operations; later calls with these shapes do not wait. "
            "To avoid the wait, set fusion=off in a config, use level='layers' in swap, or leave fuse out",
            backend,
            "traces" if backend == "eager" else "compiles",
            num_nodes,
        )

    timer = threading.Timer(_SECONDS, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _why_unavailable(name: str, device_types: set[str]) -> str | None:
    """Return None if the backend compiles for all of these device types, else what is missing."""
    if name == "eager":
        return None
    if name == "triton" and device_types == {"cpu"}:
        return "Triton compiles for GPUs, and this runs on a CPU"
    why = why_nvfuser_is_unavailable if name == "nvfuser" else why_inductor_is_unavailable
    return next((reason for device_type in sorted(device_types) if (reason := why(device_type)) is not None), None)
