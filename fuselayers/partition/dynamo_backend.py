"""dynamo_backend -- the fusion core as a backend of `torch.compile`: `torch.compile(model, backend="fuselayers")`.

torch finds the name through an entry point of the package.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.fx as fx

from ..names import no_such
from .fused_function import FuseOptions

_OPTIONS: Final = ("backend", "compress", "cuda_graphs", "fallback", "partition", "torch_random")


def fuselayers(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph as `fuse` does. `torch.compile` calls this function.

    Args:
        graph_module, example_inputs: from Dynamo.
        mode: `torch.compile`'s mode; it must be None, since modes are Inductor's.
        options: `torch.compile`'s options: those of `fuse` but `dynamic` and `fullgraph`.

    Raises:
        ValueError: a mode is given, or an option, backend or partitioner is unknown.
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
    compiled, _, _ = FuseOptions(**chosen).compile(graph_module, example_inputs)
    return compiled
