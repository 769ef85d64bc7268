import pytest
import torch

from fuselayers.cli.example import example_batch
from fuselayers.configs import build, compose
from fuselayers.partition import explain, fuse
from tests.partition.tracing import peak_of_step

EVERY_DAY = "vit_tiny"
OTHERS = (
    "bert_tiny",
    "bloom_tiny",
    "gemma2_tiny",
    "gpt2_tiny",
    "gpt_nano",
    "gpt_neox_tiny",
    "llama_tiny",
    "mistral_tiny",
)
OTHERS += ("mixtral_tiny", "opt_tiny", "phi_tiny", "qwen2_tiny", "qwen3_tiny", "t5_tiny")
# A model takes a minute to compile.
COMPILED = ("bert_tiny", "bloom_tiny", "gemma2_tiny", "gpt_nano", "opt_tiny", "qwen3_tiny", "t5_tiny", "vit_tiny")


def computed_over_measured(name: str, *, backend: str, partition: str) -> float:
    """The computed peak of a model's training step over the one that the allocator has."""
    torch.compiler.reset()  # after several models Dynamo makes inputs of their numbers, and the cut may differ
    config = compose(name, ["fusion=off"])
    model = build(config)
    sizes = (2,) if config.model.options.get("context_length") is None else (2, 64)
    inputs = example_batch(model, config, sizes, device="cpu")
    fused = fuse(model, backend=backend, partition=partition)
    computed = explain(fused, *inputs).totals["this"].peak_bytes
    assert computed is not None
    return computed / peak_of_step(fused, *inputs)


# The numbers are exact for a stack of blocks, which test_budget.py measures too; the other models are compiled
# for that alone, at five seconds each.
@pytest.mark.parametrize("name", [EVERY_DAY, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_op_by_op_it_is_what_the_allocator_has(name: str) -> None:
    for partition in ("budget:0.3",) if name == EVERY_DAY else ("min_cut", "budget:0.3"):
        assert computed_over_measured(name, backend="eager", partition=partition) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_through_inductor_it_is_near(name: str) -> None:
    # opt_tiny's loss keeps nothing but registers where the graph has three values of 64 x 512: 1.154. Counting a value
    # that only fused ops read as nothing gives 0.95 there, but 0.87 to 1.13 for the others, which are 0.90 to 1.02 now.
    most = 1.2 if name == "opt_tiny" else 1.15
    assert 0.85 < computed_over_measured(name, backend="inductor", partition="min_cut") < most
