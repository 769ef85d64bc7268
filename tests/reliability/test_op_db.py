"""Every op of PyTorch's database has the same values, gradients and random numbers with `fuse` and without."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fuselayers.partition import fuse
from tests.reliability.cases import Cases
from tests.reliability.databases import results

_SAMPLES = 3  # the first ones of each op
# Ops without results to compare.
LEFT_OUT = {
    "runs on GPUs alone": (
        "jiterator_2inputs_2outputs",
        "jiterator_4inputs_with_extra_args",
        "jiterator_binary",
        "jiterator_binary_return_by_ref",
        "jiterator_unary",
    ),
    "memory that nobody has written": (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    ),
    "sparse tensors are not fused": ("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"),
    "the phase of an eigenvector is free, and plain PyTorch refuses its gradient": ("linalg.eig",),
    "its samples are views of storage that a copy does not have": ("as_strided.partial_views",),
}
# Ops that Dynamo does not capture as one graph. The part that it leaves out runs as plain Python, the rest is fused.
BREAKS_THE_GRAPH = {
    "Python continues with a value of a tensor": (
        "allclose",
        "corrcoef",
        "cov",
        "equal",
        "nn.functional.gaussian_nll_loss",
        "tensor_split",
    ),
    "the shape of an output depends on values": (
        "combinations",
        "linalg.lstsq",
        "linalg.lstsq.grad_oriented",
        "masked_select",
        "nn.functional.ctc_loss",
    ),
    "it changes the size of its input": ("resize_", "resize_as_"),
    "it warns at every call": (
        "nn.functional.linear_cross_entropy.chunked",
        "nn.functional.linear_cross_entropy.chunked_none",
    ),
}


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """The ops by name, those of float32 on the CPU."""
    from torch.testing._internal import common_methods_invocations as database

    # The database seeds the generator inside the call of a random op, which no compiler can trace; `results` seeds it.
    monkeypatch.setattr(database, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
    return {
        f"{op.name}.{op.variant_test_name}".rstrip("."): op
        for op in database.op_db
        if torch.float32 in op.supported_dtypes("cpu")
    }


def test_every_op_agrees(cases: Cases, ops: Mapping[str, Any]) -> None:
    breaks = {name for names in BREAKS_THE_GRAPH.values() for name in names}
    left_out = {name for names in LEFT_OUT.values() for name in names}

    def check(name: str) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return ops[name](*args, **kwargs)

        samples = ops[name].sample_inputs("cpu", torch.float32, requires_grad=ops[name].supports_autograd)
        for sample in itertools.islice(samples, _SAMPLES):
            arguments = (sample.input, *sample.args), sample.kwargs
            wanted = results(call, *arguments)
            torch.compiler.reset()
            fused = fuse(call, backend="eager", fallback=(), torch_random=True, fullgraph=name not in breaks)
            torch.testing.assert_close(results(fused, *arguments), wanted, equal_nan=True)
            assert name in breaks or fused.served_by == ("eager",), "it ran as plain Python"

    cases.of_names(check, sorted(ops.keys() - left_out), few=6)
