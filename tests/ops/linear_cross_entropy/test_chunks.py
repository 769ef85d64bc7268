import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.lint_kernels.record import recorded_launches
from fuselayers.ops import linear_cross_entropy
from fuselayers.ops.linear_cross_entropy import chunks
from fuselayers.testing import DTYPES, assert_as_good_as
from tests.ops.contract import both_backends
from tests.ops.linear_cross_entropy.inputs import (
    CHUNK,
    FULL,
    D,
    R,
    V,
    gradients,
    inputs_of,
    leaves_of,
    needs_triton,
    op,
    reference,
    target_for,
)
from tests.selection import every_value


class Memory(TorchDispatchMode):
    """Counts the live bytes that ops allocate, and the elements of the largest tensor."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.elements = self.peak = self._alive = 0
        self._tensors: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._tensors:
                    self._alive += storage.nbytes()
                self._tensors[storage._cdata] = self._tensors.get(storage._cdata, 0) + 1
                weakref.finalize(tensor, self._dropped, storage._cdata, storage.nbytes())
                self.elements = max(self.elements, tensor.numel())
        self.peak = max(self.peak, self._alive)
        return out

    def _dropped(self, storage: int, size: int) -> None:
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage]
            self._alive -= size


@both_backends
@pytest.mark.parametrize(("dtype", "reduction"), every_value(DTYPES[:3], ("mean", "sum", "none")), ids=str)
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(dtype: torch.dtype, reduction: str, backend: str) -> None:
    x, weight, bias = leaves_of(R, D, classes=V, dtype=dtype)
    target = target_for(x, weight).clamp(min=0)  # ignored rows are not computed
    with Memory() as made:
        loss = linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, backend=backend, **FULL)
        gradients(loss, [x, weight, bias])
    assert made.elements == CHUNK
    with Memory() as plain:
        F.cross_entropy(F.linear(x, weight, bias), target, reduction=reduction)
    assert plain.elements == R * V


def peak_of(form: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """The peak bytes of forward and backward."""
    rows, width, classes = shape
    x = torch.empty(rows, width, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(classes, width, dtype=dtype, device="meta", requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64, device="meta")
    with Memory(x, weight, target) as memory:
        torch.autograd.grad(form(x, weight, target), [x, weight])
    return memory.peak


# Sizes and dtype decide the chunks, and the backend the buffers. The sizes are those of models, and one row more.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ((512, 4096, 128256), 1.05),
        ((2048, 4096, 128256), 1.05),
        ((4096, 4096, 128256), 1.05),
        ((4097, 4096, 128256), 1.2),  # two chunks, for one row more
        ((8192, 4096, 128256), 0.9),
        ((4096, 2048, 32000), 0.9),
        ((65536, 768, 50257), 0.05),
    ],
    ids=str,
)
def test_takes_no_more_memory_than_the_plain_way(
    shape: tuple[int, int, int], share: float, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 512)
    monkeypatch.setattr(chunks, "LOGITS_AT_ONCE", 1 << 28)
    plain = peak_of(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target), shape, dtype)
    with recorded_launches() if backend == "triton" else nullcontext():
        ours = peak_of(partial(linear_cross_entropy, backend=backend), shape, dtype)
    assert ours <= share * plain


@both_backends
@pytest.mark.parametrize(("dtype", "classes"), every_value(DTYPES[:3], (33, 9000)), ids=str)
def test_sums_of_many_chunks_in_slices_of_the_classes(dtype: torch.dtype, classes: int, backend: str) -> None:
    inputs = inputs_of(13, 2, classes=classes, dtype=dtype)
    assert_as_good_as(partial(op, backend=backend), reference, inputs, reduction="sum")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_of_a_compiled_graph_has_all_logits(reduction: str) -> None:
    largest = []

    def look(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        for node in graph_module.graph.nodes:
            largest.extend(tensor.numel() for tensor in tree_leaves(node.meta.get("val")) if isinstance(tensor, Tensor))
        return make_boxed_func(graph_module.forward)

    leaves = leaves_of(R, D, classes=V)
    compiled = torch.compile(partial(op, reduction=reduction), backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    gradients(compiled(*leaves), leaves)
    # the weight and its gradient are the largest tensors
    assert max(largest) == V * D
