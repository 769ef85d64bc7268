"""The Inductor compiler: C++ on the CPU, Triton on a GPU, with forward and backward cut by our partitioner."""

import functools
import hashlib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.fx as fx
from torch.utils._triton import has_triton

from ..partitioners import Partitioner, partitioner
from ..torch_private import CustomPartitionerFn, compile_with_inductor, cpp_compiler

__all__ = ["compile_inductor", "why_inductor_is_unavailable"]


def why_inductor_is_unavailable(device_type: str) -> str | None:
    """Return None if Inductor can compile for `device_type` ("cpu", "cuda"), else what is missing."""
    if device_type == "cpu":
        try:
            cpp_compiler()
        except (RuntimeError, OSError):
            return "no C++ compiler was found; install g++ or set CXX"
        return None
    return None if has_triton() else f"Triton cannot compile for {device_type} here"


def compile_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, partition: str | Partitioner
) -> Callable[..., Any]:
    """Compile a Dynamo graph, forward and backward at once."""
    cut = _InductorPartitioner(
        partitioner(partition, fused=True), name=partition if isinstance(partition, str) else None
    )
    return compile_with_inductor(graph_module, example_inputs, cut)


class _InductorPartitioner(CustomPartitionerFn):
    """A partitioner in the form in which Inductor's configuration takes one."""

    def __init__(self, cut: Partitioner, *, name: str | None) -> None:
        self._cut = cut
        # Inductor caches compiled code on disk under this key: code of another partitioner must never be found there.
        # A user's own function has no name that stands for its behaviour, so nothing is found for it across processes.
        self._key = f"{name}-{_sources_hash()}" if name is not None else str(uuid.uuid4())

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._cut(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._key

    def __deepcopy__(self, memo: dict[int, Any]) -> "_InductorPartitioner":
        return self  # the configuration that holds it is copied; a partitioner has no state to copy

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._key,)


@functools.cache
def _sources_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
