"""dynamo_backend -- `torch.compile(model, backend="fuselayers")`: the fusion core as a backend of torch's own compiler.

An entry point of the package gives torch the name.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.fx as fx

from ..names import no_such
from .backends import check_backends
from .choose.partitioners import partitioner
from .fused_function import FuseOptions

_OPTIONS: Final = ("backend", "compress", "fallback", "partition", "torch_random")


def fuselayers(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo as `fuse` does. `torch.compile` calls it.

    Args:
        graph_module, example_inputs: from Dynamo.
        mode: of `torch.compile`; Inductor's modes are not taken.
        options: of `torch.compile`: `backend`, `compress`, `fallback`, `partition` and `torch_random` of `fuse`.

    Raises:
        ValueError: there is a mode, an unknown option, backend or partitioner.
        BackendUnavailableError, PartitionError: as `fuse`.

    >>> import torch
    >>> double = torch.compile(lambda x: x * 2, backend=fuselayers, options={"backend": "eager"})
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    if mode is not None:
        raise ValueError(f"the backend 'fuselayers' has no mode {mode!r}; leave it out, or use options")
    chosen = dict(options or {})
    for name in chosen:
        if name not in _OPTIONS:
            raise ValueError(no_such("option of the backend 'fuselayers'", name, _OPTIONS))
    # An unknown name is refused here, by its own error.
    backend = chosen.get("backend", "auto")
    compiled, _, _ = FuseOptions(
        backend=backend,
        chain=check_backends(backend, chosen.get("fallback", ("inductor", "eager"))),
        partition=partitioner(chosen.get("partition", "min_cut"), compress=chosen.get("compress")),
        torch_random=bool(chosen.get("torch_random", False)),
    ).compile(graph_module, example_inputs)
    return compiled
