"""A model in round numbers, so that plans can be computed by hand."""

import pytest

from fuselayers.cli.plan.model import PlannedModel, Sizes
from fuselayers.cli.plan.work import Counted, Pass, Work

# A layer of 1,000 weights, 200 beside the layers; in an example 40 bytes of stream.
SIZES = Sizes(layer=((40, 20), (200,)), rest=((20, 10),), num_layers=4, stream_bytes=40.0)
# A layer saves 300 bytes of an example, 200 of them inside of attention and feedforward.
COUNTED = Counted(
    fixed=Pass(working_bytes=64.0),
    example=Pass(saved_bytes=100.0, forward=Work(matmul_flops=1e3), backward=Work(matmul_flops=2e3)),
    layer_fixed=Pass(),
    layer_example=Pass(300.0, 200.0, 0.0, Work(4e3, 1e3, 60.0), Work(8e3, 2.5e3, 120.0)),
)


KINDS = dict.fromkeys(("eager", "min_cut", "selective", "budget:0.3"), COUNTED)
TOY = PlannedModel("toy", SIZES, 10, "bfloat16", "min_cut", KINDS, 8, 4)


@pytest.fixture
def model() -> PlannedModel:
    return TOY
