import pytest
import torch

from fuselayers.cli.example import example_batch
from fuselayers.configs import build, choices, compose
from fuselayers.partition import explain, fuse
from tests.partition.tracing import peak_of_step

EVERY_DAY = "vit_tiny"
OTHERS = [*(name for name in choices("model") if name.endswith("_tiny") and name != EVERY_DAY), "gpt_nano"]
# Each takes a minute to compile.
COMPILED = ("bert_tiny", "bloom_tiny", "gemma2_tiny", "gpt_nano", "opt_tiny", "qwen3_tiny", "t5_tiny", "vit_tiny")


def computed_over_measured(name: str, *, backend: str, partition: str) -> float:
    """The computed peak of a model's training step over the allocator's peak."""
    torch.compiler.reset()  # after several models Dynamo turns their numbers into inputs, which may change the cut
    config = compose(name, ["fusion=off"])
    model = build(config)
    sizes = (2,) if config.model.options.get("context_length") is None else (2, 64)
    inputs = example_batch(model, config, sizes, device="cpu")
    fused = fuse(model, backend=backend, partition=partition)
    computed = explain(fused, *inputs).totals["this"].peak_bytes
    assert computed is not None
    return computed / peak_of_step(fused, *inputs)


# The figures are exact for a stack of blocks, as in test_budget.py. Each other model takes five seconds to compile.
@pytest.mark.parametrize("name", [EVERY_DAY, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_op_by_op_it_is_the_allocators_peak(name: str) -> None:
    for partition in ("budget:0.3",) if name == EVERY_DAY else ("min_cut", "budget:0.3"):
        assert computed_over_measured(name, backend="eager", partition=partition) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_through_inductor_it_is_near(name: str) -> None:
    # opt_tiny has 1.154: its fused loss keeps in registers three values of 64 x 512 that the graph counts. Leaving out
    # the values that only fused ops read gives 0.95 there, but 0.87 to 1.13 for the others, which have 0.90 to 1.02.
    most = 1.2 if name == "opt_tiny" else 1.15
    assert 0.85 < computed_over_measured(name, backend="inductor", partition="min_cut") < most
