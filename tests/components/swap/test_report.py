import json

import pytest
import torch
import torch._inductor.config
from torch import nn

from fuselayers.components.swap import swap
from fuselayers.partition import FallbackWarning
from tests.components.swap.layers import inputs, layer


def test_it_counts_bytes_and_explains_its_columns() -> None:
    report = swap(layer("gated"), level="layers", batch=inputs("gated"))
    # x, gate(x), up(x) and a seed. The plain layer also saves the activation, the product, the mask and its result.
    assert report.saved_after == (6 * 8 + 2 * 6 * 16) * 4 + 8
    assert report.saved_before > 1.5 * report.saved_after
    assert json.loads(json.dumps(report.to_dict()))["saved_after"] == report.saved_after
    lines = str(report).splitlines()
    assert lines[0] == "swap, level layers: 2 modules"
    assert lines[1].split() == ["class", "rule", "modules", "error", "kept"]
    assert any(line.startswith("  error: largest error of results and gradients") for line in lines)
    assert "a training call keeps 968 B of 2.1 kB for backward: 0.46" in str(report)


def test_the_backend_of_blocks_is_what_their_graphs_fell_back_to() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)))
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(FallbackWarning, match="inductor"),
    ):
        report = swap(model, level="blocks", batch=torch.randn(3, 4))
    assert [(site.rule, site.backend) for site in report.sites] == [("block", "eager")] * 2


def test_a_model_that_does_not_run_in_training_has_no_total() -> None:
    class Evaluating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer("sequence")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise RuntimeError("not in training")
            return self.inner(x)

    model = Evaluating().train()
    assert swap(model, level="layers", batch=torch.randn(2, 8)).saved_before is None
    assert model.training
