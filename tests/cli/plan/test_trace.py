"""The counts of one and two layers against the whole model: measured, explained, and by `model_costs`."""

import pytest
import torch

from fuselayers.cli.plan.trace import count, depth_of
from fuselayers.configs import build, compose, model_costs
from fuselayers.partition import explain, saved_bytes
from tests.cli.conftest import TINY_MODEL

TINY = [*TINY_MODEL, "model.num_layers=3", "fusion=off"]


def test_the_eager_step_is_what_autograd_saves_and_torch_counts() -> None:
    config = compose("gpt_nano", TINY)
    one = count(config, kinds=["eager"], tokens=None, dtype=torch.float32)["eager"].step(5, num_layers=3)
    model = build(config)
    assert one.saved_bytes == saved_bytes(model, *model.example_inputs(5, device="cpu"))
    costs = model_costs(config)
    # `model_costs` counts all scores of a causal attention, this half of them, and forward's a second time in backward.
    attention = one.forward.attention_flops
    assert one.forward.matmul_flops + 2 * attention == 5 * costs.forward_flops
    assert one.backward.matmul_flops + 4 * attention == 5 * costs.backward_flops
    assert one.backward.attention_flops == 2.5 * attention


def test_a_shorter_sequence_saves_less() -> None:
    config = compose("gpt_nano", TINY)
    long, short = (count(config, kinds=["eager"], tokens=tokens, dtype=torch.float32)["eager"] for tokens in (None, 8))
    assert short.step(1, num_layers=3).saved_bytes < 0.6 * long.step(1, num_layers=3).saved_bytes


def test_layers_that_differ_are_counted_whole() -> None:
    assert depth_of(compose("gpt_nano", ["model.num_layers=5"])) == (5, True)
    config = compose("gemma2_tiny", ["fusion=off", "attention.window=8"])
    assert depth_of(config) == (2, False)
    one = count(config, kinds=["eager"], tokens=None, dtype=torch.float32)["eager"].step(3, num_layers=2)
    model = build(config)
    assert one.saved_bytes == saved_bytes(model, *model.example_inputs(3, device="cpu"))


@pytest.mark.slow
def test_a_fused_step_saves_what_explain_says_of_the_whole_model() -> None:
    config = compose("gpt_nano", TINY)
    counted = count(config, kinds=["min_cut", "budget:0.3", "selective"], tokens=None, dtype=torch.float32)
    model = build(config)
    report = explain(model, *model.example_inputs(5, device="cpu"), backend="inductor", partition="min_cut")
    one = {kind: value.step(5, num_layers=3) for kind, value in counted.items()}
    assert one["min_cut"].saved_bytes == pytest.approx(report.totals["this"].saved_bytes, rel=0.02)
    attention = one["min_cut"].forward.attention_flops
    assert one["min_cut"].forward.matmul_flops + 2 * attention == pytest.approx(report.forward_flops)
    assert one["budget:0.3"].saved_bytes < one["min_cut"].saved_bytes
    assert one["budget:0.3"].backward.matmul_flops > one["min_cut"].backward.matmul_flops
    assert one["selective"].backward.matmul_flops > one["min_cut"].backward.matmul_flops
