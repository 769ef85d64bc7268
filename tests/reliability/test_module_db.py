"""Every module of PyTorch's database has the same results with `fuse` and without, in training and in eval mode."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fuselayers.partition import fuse
from tests.reliability.cases import Cases
from tests.reliability.databases import results

_SAMPLES = 3  # the first ones of each module and mode
# Modules that Dynamo does not capture as one graph. The part that it leaves out runs as plain Python.
BREAKS_THE_GRAPH = {
    "Dynamo leaves recurrent modules to PyTorch's own kernels": ("nn.GRU", "nn.LSTM", "nn.RNN"),
    "the shape of an output depends on values": ("nn.CTCLoss",),
    "Python continues with a value of a tensor": ("nn.GaussianNLLLoss",),
    "momentum=None divides by the number of batches, a tensor": ("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d"),
}


@pytest.fixture
def modules() -> Mapping[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db if torch.float32 in info.supported_dtypes("cpu")}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_module_agrees(mode: str, cases: Cases, modules: Mapping[str, Any]) -> None:
    training = mode == "train"
    breaks = {name for names in BREAKS_THE_GRAPH.values() for name in names}

    def check(name: str) -> None:
        info = modules[name]
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in samples[:_SAMPLES]:
            made, inputs = sample.constructor_input, sample.forward_input
            plain = info.module_cls(*made.args, **made.kwargs).to(torch.float32).train(training)
            other = copy.deepcopy(plain)
            torch.compiler.reset()
            whole = name not in breaks
            fused = fuse(other, backend="eager", fallback=(), torch_random=True, fullgraph=whole)
            got, wanted = (
                results(module, inputs.args, inputs.kwargs, parameters=[*module.parameters()])
                for module in (fused, plain)
            )
            if name.startswith("nn.Lazy"):
                # Dynamo initialises it while it traces, and restores the generator: leave out the generator's state.
                got, wanted = got[::2], wanted[::2]
            torch.testing.assert_close(got, wanted, equal_nan=True)
            torch.testing.assert_close(dict(other.named_buffers()), dict(plain.named_buffers()))
            assert not whole or {graph.served_by for graph in fused.report().graphs} == {"eager"}, (
                "it ran as plain Python"
            )

    cases.of_names(check, sorted(modules), few=2)
