"""Waits, launches and memory of a training step of every tiny model, and of generation."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fuselayers
from fuselayers.cli.train.data import read_text
from fuselayers.cli.train.engine import ALONE, Engine, start_engine
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.cli.train.optimizer import build_optimizer
from fuselayers.components.model.plain_torch import plain_twin
from fuselayers.configs import choices, compose
from fuselayers.partition import FallbackWarning, explain, fuse, saved_bytes
from tests.gpu.hollow.driver import counted

MODELS = [*(name for name in choices("model") if name.endswith("_tiny")), "gpt_nano", "hierarchical_vision"]
TWINS = ["bert_tiny", "gpt2_tiny", "gpt_nano", "llama_tiny", "opt_tiny", "qwen2_tiny", "vit_tiny"]
FUSED = ["gpt_nano", "llama_tiny", "mixtral_tiny", "t5_tiny"]  # each compiles for 15 s
# The most peak memory of a step, as a multiple of plain PyTorch's; 1.2 for the others. With few classes the logits
# are most of a tiny model's memory, and plain PyTorch rounds their log-probabilities to bfloat16 under autocast.
MOST_MEMORY = {"gpt_nano": 1.0, "llama_tiny": 1.0}


def built(name: str, *overrides: str, device: str = "cuda:0") -> Any:
    return fuselayers.build(name, overrides).to(device).train()


def training_step(model: nn.Module, example: Any) -> Callable[[], None]:
    """A step in bfloat16, as `fuselayers train` makes it."""
    optimizer = build_optimizer(model, compose().train)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*example)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """The peak of torch's allocated memory during a step, above the memory before it."""
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def check_steady(step: Callable[[], None], *, device: int = 0) -> None:
    """From the third step on every step launches as many kernels as the step before, and no step waits."""
    step()
    step()
    first, second = counted(step), counted(step)
    assert second.waits == [0, 0], second.lines
    assert second.launches == first.launches
    assert second.launches[1 - device] == 0 < second.launches[device]


@pytest.mark.parametrize("name", MODELS)
def test_a_steady_step_of_training_does_not_wait(name: str) -> None:
    model = built(name, "fusion=off")
    check_steady(training_step(model, model.example_inputs(4, device="cuda")))


def test_a_step_of_the_trainer_does_not_wait_nor_does_the_reading_of_the_one_before(tmp_path: Path) -> None:
    """Loss and norm are copied together while the step runs; batches come from page-locked memory."""
    (tmp_path / "text").write_text("hollow " * 1000)
    trainer = Trainer(
        Engine(built("gpt_nano", "fusion=off")),
        read_text(str(tmp_path / "text")),
        config=compose("gpt_nano", ["train=quick"]).train,
        sequence_length=16,
        device=torch.device("cuda:0"),
    )
    before = trainer.step(1)
    updates: list[Update] = []
    assert counted(lambda: updates.append(trainer.step(2))).waits == [0, 0]
    assert counted(before.read).lines == []
    assert len(updates[0].read()) == 2


def test_train_captures_cuda_graphs(tmp_path: Path) -> None:
    """Two accumulated micro-batches and a validation between two steps. The optimizer's kernels are not captured."""
    (tmp_path / "text").write_text("hollow " * 1000)
    device, overrides = torch.device("cuda:0"), ["train=quick", "train.accumulate=2", "train.evaluate_batches=1"]
    config = compose("gpt_nano", [*overrides, "model.num_layers=2"])
    model = fuselayers.build(config, ["fusion=off"])
    trainer = Trainer(
        start_engine(model, config, processes=ALONE, device=device),
        read_text(str(tmp_path / "text")),
        config=config.train,
        sequence_length=16,
        device=device,
    )

    def step(number: int) -> None:
        trainer.step(number)

    for number in range(1, 5):
        step(number)
        trainer.validation_loss()
    count = counted(lambda: step(5))
    assert count.waits == [0, 0], count.lines
    assert count.launches[0] < 80  # 67, where the optimizer and the clipping have most
    assert {graph.served_by for graph in trainer.model.report().graphs} == {"triton"}  # type: ignore[operator]


@pytest.mark.parametrize("name", FUSED)
def test_a_steady_step_of_a_fused_model_does_not_wait(name: str) -> None:
    example = built(name, "fusion=off").example_inputs(4, device="cuda")
    check_steady(training_step(built(name, "fusion=inductor"), example))


def test_a_step_of_eager_layers_starts_fewer_kernels_than_plain_pytorch() -> None:
    """Forward and backward of a GPT in bfloat16; the optimizer's kernels are the same for both."""
    model = built("gpt_nano", "fusion=off").bfloat16()
    example = model.example_inputs(8, device="cuda")

    def launches(model: nn.Module) -> int:
        def step() -> None:
            model(*example).backward()

        step()
        return counted(step).launches[0]

    assert launches(model) < launches(plain_twin(model).train())


@pytest.mark.parametrize("fusion", ["off", "inductor"])
def test_the_host_starts_a_graphed_step_with_a_few_calls(fusion: str) -> None:
    """A graph of forward and one of backward, and copies. Nothing waits while they are captured: it would raise."""
    model = built("gpt_nano", f"fusion={fusion}").bfloat16()
    example = model.example_inputs(8, device="cuda")
    weights = list(model.parameters())
    graphed = torch.cuda.make_graphed_callables(model, tuple(example))  # type: ignore[no-untyped-call]
    counts = counted(lambda: torch.autograd.grad(graphed(*example), weights))
    assert counts.waits == [0, 0], counts.lines
    assert 2 <= counts.launches[0] < 10  # eager layers: 120


def test_a_model_fused_with_cuda_graphs_owns_its_results() -> None:
    """The host starts a step with a few calls. Inductor's graphs would overwrite the losses and gradients of a step."""
    options = ("fusion.scope=model", "fusion.cuda_graphs=true", "model.num_layers=2")
    model = built("gpt_nano", *options).bfloat16()
    example, weights = model.example_inputs(8, device="cuda"), list(model.parameters())

    def step() -> tuple[torch.Tensor, ...]:
        loss = model(*example)
        return loss, *torch.autograd.grad(loss, weights)

    for _ in range(4):
        step()
    count = counted(step)
    assert count.waits == [0, 0], count.lines
    assert 2 <= count.launches[0] < 12
    kept = [step() for _ in range(2)]
    assert not {tensor.data_ptr() for tensor in kept[0]} & {tensor.data_ptr() for tensor in kept[1]}
    for _ in range(3):  # two forwards before a backward, accumulated gradients, another shape
        (model(*example) + model(*example)).backward()
    model(*model.example_inputs(1, device="cuda")).backward()
    assert {graph.served_by for graph in model.report().graphs} == {"triton"}


def test_cuda_graphs_end_before_experts_whose_sizes_the_host_reads() -> None:
    """A capture would raise."""
    options = ("fusion.scope=model", "fusion.cuda_graphs=true", "model.num_layers=1")
    model = built("mixtral_tiny", *options)
    example = model.example_inputs(4, device="cuda")

    def step() -> None:
        model(*example).backward()

    for _ in range(4):
        step()
    count = counted(step)
    assert 0 < sum(count.waits) <= 9  # one in each product
    assert {graph.served_by for graph in model.report().graphs} == {"triton"}


def test_a_cpu_has_no_cuda_graphs() -> None:
    with pytest.warns(FallbackWarning, match=r"^cuda_graphs=True captures nothing on a CPU; it needs a GPU,"):
        fuse(torch.sin, cuda_graphs=True)(torch.ones(3))


def test_the_example_of_the_page_captures_a_model_under_autocast() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cuda_graphs.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    example = names["tokens"], names["targets"]
    assert counted(lambda: names["model"](*example)).launches[0] < 10


def test_a_reversible_model_is_not_captured() -> None:
    model = built("gpt_nano", "fusion=off", "model.block=reversible")
    with pytest.raises(RuntimeError, match=r"^reversible blocks set torch's generator back .* use model.block=transf"):
        torch.cuda.make_graphed_callables(model, tuple(model.example_inputs(8, device="cuda")))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("partition", ["min_cut", "budget:0.65"])
def test_explain_counts_what_the_triton_backend_saves(partition: str) -> None:
    block = built("gpt_nano", "fusion=off").bfloat16().blocks[1]
    x = torch.zeros(8, 128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    report = explain(block, x, backend="triton", partition=partition)
    fused = fuse(block, backend="triton", partition=partition, fallback=())
    assert report.totals["this"].saved_bytes == saved_bytes(fused, x)


def test_a_model_trains_on_another_device_than_the_current_one() -> None:
    model = built("gpt_nano", "fusion=off", device="cuda:1")
    check_steady(training_step(model, model.example_inputs(4, device="cuda:1")), device=1)


@pytest.mark.parametrize("name", TWINS)
def test_the_memory_of_a_step_against_plain_pytorch(name: str) -> None:
    """BERT drops inside attention too, whose kernels keep no probabilities."""
    model = built(name, "fusion=off")
    example = model.example_inputs(32, device="cuda")
    ours, plain = (peak_bytes(training_step(form, example)) for form in (model, plain_twin(model)))
    assert ours <= MOST_MEMORY.get(name, 1.2) * plain


@pytest.mark.parametrize("name", ["gpt_nano", "mixtral_tiny", "t5_tiny"])
def test_generation_waits_only_to_see_whether_it_has_ended(name: str) -> None:
    """With stop tokens it waits once in sixteen tokens and at the end, else never. In float32 experts wait too."""
    model = built(name, "fusion=off").eval().bfloat16()
    prompt_BT = torch.zeros(2, 4, dtype=torch.int64, device="cuda")

    def waits(**options: Any) -> int:
        model.generate(prompt_BT, 32, temperature=0.0, **options)
        return sum(counted(lambda: model.generate(prompt_BT, 32, temperature=0.0, **options)).waits)

    assert waits() == 0
    assert waits(stop_tokens=(5,)) == 2


def test_generation_waits_once_to_check_a_mask() -> None:
    model = built("gpt_nano", "fusion=off").eval()
    prompt_BT, mask_BT = torch.zeros(2, 4, dtype=torch.int64).cuda(), torch.ones(2, 4, dtype=torch.bool).cuda()

    def generate() -> None:
        # Kernels do nothing on this driver, so the check of the mask may fail.
        with contextlib.suppress(ValueError):
            model.generate(prompt_BT, 4, key_padding_mask=mask_BT)

    assert counted(generate).waits == [1, 0]
