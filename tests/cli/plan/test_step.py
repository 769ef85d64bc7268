"""Plans of a model in round numbers, against plans computed by hand."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fuselayers.cli.plan.model import Activations, PlannedModel
from fuselayers.cli.plan.step import collectives_of, gpu_layout, layout_text, link_bandwidth, memory_of, plan_of
from fuselayers.configs import ParallelConfig, compose
from fuselayers.hardware import GPUS

H100 = GPUS["H100"]
ALONE = replace(compose().parallel, dp=1)
# Four blocks of 1,000 parameters and 200 others; each block keeps 300 bytes of an example, 200 of them inside.
RUN = Activations(saved=1200.0, inside=800.0, largest=300.0, repeated_flops=0.0)
TOY = PlannedModel("toy", 4200, 1000, 4, 10, 4, 8, False, (8, 4), 2, 6e6, 160.0, RUN, RUN)


def _moved(layout: ParallelConfig, model: PlannedModel = TOY) -> dict[str, float]:
    return {sent.kind: sent.moved for sent in collectives_of(model, layout, batch=2)}


def test_weights_gradients_and_optimizer_are_what_pytorch_allocates() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 7, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    memory = memory_of(replace(TOY, parameters=sum(parameter.numel() for parameter in parameters)), ALONE, batch=1)
    assert memory.weights == sum(parameter.nbytes for parameter in parameters)
    assert memory.gradients == sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    assert memory.optimizer == sum(moment.nbytes for moment in moments)


def test_fsdp_divides_states_and_gathers_two_blocks() -> None:
    whole, sharded = (memory_of(TOY, replace(ALONE, dp=4, shard=shard), batch=2) for shard in ("ddp", "fsdp"))
    assert whole.weights == 4 * 4200
    assert whole.copies == 2 * 4200
    assert sharded.weights == sharded.gradients == sharded.optimizer / 2 == 4200
    assert sharded.copies == 2 * 2 * 1000 + 4 * 1000
    assert whole.activations == sharded.activations == 2 * 1200
    assert whole.logits == 2 * 10 * 8 * (2 + 4 + 4)


def test_tensor_parallelism_divides_the_inside_and_sequence_parallelism_all() -> None:
    assert memory_of(TOY, replace(ALONE, tp=2), batch=1).activations == 400 + 800 / 2
    assert memory_of(TOY, replace(ALONE, tp=2, sequence=True), batch=1).activations == 1200 / 2


def test_a_fused_loss_has_the_logits_of_a_chunk() -> None:
    model = replace(TOY, tokens=8192, width=4096, vocabulary=128256, fused_loss=True)
    assert memory_of(model, ALONE, batch=1).logits == 2 * 2 * 4096 * 128256 + 4 * 4096 * 128256


def test_recomputed_blocks_keep_their_inputs_and_exist_one_at_a_time() -> None:
    model = replace(TOY, kept=Activations(160.0, 0.0, 300.0, 2e6))
    assert memory_of(model, replace(ALONE, checkpointing="block"), batch=2).activations == 2 * (160 + 300)


def test_ddp_reduces_gradients_and_fsdp_gathers_weights_twice() -> None:
    assert _moved(replace(ALONE, dp=4, shard="ddp")) == {"all-reduce": 2 * 4 * 4200 * 3 / 4}
    gathered = {"all-gather": 2 * 2 * 4200 * 3 / 4, "reduce-scatter": 4 * 4200 * 3 / 4}
    assert _moved(replace(ALONE, dp=4, shard="fsdp")) == gathered


def test_tensor_parallelism_reduces_the_stream_four_times_a_block() -> None:
    assert _moved(replace(ALONE, tp=2)) == {"all-reduce": 4 * 2 * 160}
    assert _moved(replace(ALONE, tp=2, sequence=True)) == {"all-gather": 6 * 160, "reduce-scatter": 4 * 160}
    again = replace(TOY, kept=replace(RUN, repeated_flops=1e6))
    assert _moved(replace(ALONE, tp=2), again) == {"all-reduce": 6 * 2 * 160}


def test_a_group_has_the_slowest_link_on_its_ring() -> None:
    assert link_bandwidth(H100, 4, stride=2) == pytest.approx(0.8 * 450e9)
    assert link_bandwidth(H100, 64) == pytest.approx(0.8 * 400e9)  # eight adapters of 50 GB/s
    assert link_bandwidth(H100, 8, stride=8) == pytest.approx(0.8 * 50e9)  # an adapter of each node
    assert link_bandwidth(GPUS["MI300X"], 2) == pytest.approx(0.8 * 64e9)  # measured: 47.7 GB/s, and 313 for eight
    assert link_bandwidth(GPUS["MI300X"], 8) == pytest.approx(0.8 * 448e9)


def test_a_step_takes_its_flops_and_bytes_and_what_no_computation_hides() -> None:
    slow = replace(H100, low_precision_flop_rate=6e6, bandwidth=1e6, link=1e6)
    alone = plan_of(TOY, slow, ALONE, batch=1, efficiency=0.5)
    assert alone.compute_seconds == pytest.approx((1 + (2 * 1200 + 10 * 4 * 4200) / 1e6) / 0.5)
    assert alone.utilisation == pytest.approx(1 / alone.seconds)
    assert alone.tokens_per_second == pytest.approx(10 / alone.seconds)
    assert plan_of(TOY, slow, replace(ALONE, dp=4, shard="fsdp"), batch=1, efficiency=0.5).exposed_seconds == 0
    tensor = plan_of(TOY, slow, replace(ALONE, tp=2), batch=1, efficiency=0.5)
    assert tensor.exposed_seconds == pytest.approx(4 * 160 / 0.8e6)
    late = plan_of(TOY, replace(slow, link=1e3), replace(ALONE, dp=4, shard="ddp"), batch=1, efficiency=0.5)
    assert late.exposed_seconds == pytest.approx(2 * 4 * 4200 * 3 / 4 / 0.8e3 - late.compute_seconds)


def test_the_batch_is_the_largest_power_of_two_that_fits() -> None:
    room = memory_of(TOY, ALONE, batch=7).total
    assert plan_of(TOY, replace(H100, memory=room / 0.92), ALONE, efficiency=0.5).batch == 4
    error = r"toy does not fit with dp 1 none and a batch of 1: it needs .* GB on each GPU, and H100 has 0\.0 GB to use"
    with pytest.raises(ValueError, match=error + r".*; lower batch, set parallel\.checkpointing=block or parallel\.tp"):
        plan_of(TOY, replace(H100, memory=1000.0), ALONE, efficiency=0.5)


def test_groups_are_counted_and_are_of_fsdp_unless_said() -> None:
    parallel = compose("gpt_nano", ["parallel.tp=2", "parallel.sequence=true"]).parallel
    layout = gpu_layout(parallel, gpus=16)
    assert layout == replace(ALONE, dp=8, tp=2, sequence=True, shard="fsdp")
    assert layout_text(layout) == "dp 8 fsdp, tp 2 + sequence"
    assert gpu_layout(compose("gpt_nano").parallel, gpus=1) == ALONE


@pytest.mark.parametrize(
    ("overrides", "gpus", "error"),
    [
        (["parallel.tp=3"], 8, "gpus=8 does not fit parallel.tp=3; set parallel.tp to a divisor of gpus"),
        (["parallel.tp=2", "parallel.dp=3"], 8, "gpus=8 does not fit parallel.dp=3 x parallel.tp=2; set parallel.tp"),
        (["parallel.tp=2", "parallel.shard=ddp"], 8, "parallel.shard=ddp cannot hold weights that parallel.tp=2 div"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_numbers(overrides: list[str], gpus: int, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        gpu_layout(compose("gpt_nano", overrides).parallel, gpus=gpus)


@pytest.mark.parametrize(
    ("heads", "error"),
    [((6, 6), "heads of the attention, which has 6"), ((None, None), "heads of the attention, which has none")],
)
def test_tensor_parallelism_divides_heads(heads: tuple[int | None, int | None], error: str) -> None:
    with pytest.raises(ValueError, match=f"parallel.tp=4 must divide the {error}"):
        plan_of(replace(TOY, heads=heads), H100, replace(ALONE, tp=4), efficiency=0.5)
