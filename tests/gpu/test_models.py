"""Whole models on a GPU: their numbers against the CPU's and, fused, against eager layers with the same masks."""

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuselayers
from fuselayers.cli.main import main
from fuselayers.configs import choices
from fuselayers.partition import explain
from plots.gpu_step import captured
from tests.ops.contract import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]
MODELS = [*(name for name in choices("model") if name.endswith("_tiny")), "gpt_nano", "hierarchical_vision"]
DECODERS = ["gpt_nano", "llama_tiny", "mixtral_tiny", "t5_tiny"]
EXAMPLES = 4


def built(name: str, *overrides: str, device: torch.device | str = DEVICE) -> Any:
    torch.manual_seed(0)
    return fuselayers.build(name, overrides).to(device).train()


def inputs_of(model: Any, device: torch.device | str = DEVICE) -> list[Tensor]:
    """Random tokens, classes and pixels; with ten different numbers every vocabulary has them."""
    shapes = model.example_inputs(EXAMPLES, device="cpu")
    torch.manual_seed(2)
    return [(torch.randn_like(part) if part.is_floating_point() else part.random_(10)).to(device) for part in shapes]


def loss_and_gradients(model: nn.Module, example: Sequence[Tensor]) -> list[Tensor]:
    """The loss and the gradients of all parameters, with the masks of seed 1."""
    torch.manual_seed(1)
    loss = model(*example)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_equal_but_for_rounding(got: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    """A gradient's difference counts as a share of the gradient, and of the largest where it is small."""
    torch.testing.assert_close(got[0], wanted[0].to(got[0]), rtol=tolerance, atol=0.0)
    largest = max(float(gradient.norm()) for gradient in wanted[1:])
    for mine, right in zip(got[1:], wanted[1:], strict=True):
        error = float((mine - right.to(mine)).norm())
        assert error <= tolerance * max(float(right.norm()), 0.01 * largest)


@pytest.mark.parametrize("name", MODELS)
def test_eager_layers_have_the_numbers_of_the_cpu(name: str) -> None:
    """Without dropout: the two draw other seeds."""
    model = built(name, "fusion=off", device="cpu").eval()
    example = inputs_of(model, "cpu")
    right = loss_and_gradients(
        model.double(), [part.double() if part.is_floating_point() else part for part in example]
    )
    got = loss_and_gradients(copy.deepcopy(model).float().to(DEVICE), [part.to(DEVICE) for part in example])
    assert_equal_but_for_rounding([part.cpu() for part in got], right, 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_has_the_numbers_and_masks_of_its_layers(name: str) -> None:
    layers, fused = built(name, "fusion=off"), built(name, "fusion=inductor")
    example = inputs_of(layers)
    assert_equal_but_for_rounding(loss_and_gradients(fused, example), loss_and_gradients(layers, example), 1e-3)


@pytest.mark.filterwarnings("error::fuselayers.errors.FallbackWarning")
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("fusion", ["triton", "auto", "eager"])
def test_every_backend_has_the_numbers_and_masks_of_eager_layers(fusion: str, name: str) -> None:
    layers, fused = built(name, "fusion=off"), built(name, f"fusion={fusion}")
    example = inputs_of(layers)
    assert_equal_but_for_rounding(loss_and_gradients(fused, example), loss_and_gradients(layers, example), 1e-3)


@pytest.mark.parametrize("name", DECODERS)
def test_one_graph_of_the_whole_model(name: str) -> None:
    layers, fused = built(name, "fusion=off"), built(name, "fusion=inductor", "fusion.scope=model")
    example = inputs_of(layers)
    assert_equal_but_for_rounding(loss_and_gradients(fused, example), loss_and_gradients(layers, example), 1e-3)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("compress", "tolerance"), [("bfloat16", 0.01), ("int8", 0.05), ("float8", 0.08)])
def test_saves_in_fewer_bits(name: str, compress: str, tolerance: float) -> None:
    layers = built(name, "fusion=off")
    fused = built(name, "fusion=inductor", f"fusion.compress={compress}")
    example = inputs_of(layers)
    got, wanted = loss_and_gradients(fused, example), loss_and_gradients(layers, example)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=0.0)
    assert_equal_but_for_rounding(got, wanted, tolerance)


@pytest.mark.parametrize("fusion", ["off", "inductor"])
@pytest.mark.parametrize("name", DECODERS)
def test_ten_steps_under_autocast_lower_the_loss(name: str, fusion: str) -> None:
    model = built(name, f"fusion={fusion}")
    example = inputs_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(10):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*example)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("fusion", ["off", "inductor"])
def test_a_step_in_a_cuda_graph_has_new_masks_at_each_replay(fusion: str) -> None:
    model = built("gpt_nano", f"fusion={fusion}")
    example = inputs_of(model)
    expected, result = model(*example).item(), torch.zeros((), device=DEVICE)

    def step() -> None:
        loss = model(*example)
        torch.autograd.grad(loss, list(model.parameters()))
        result.copy_(loss.detach())

    replay, losses = captured(step), set()
    for _ in range(3):
        replay()
        losses.add(result.item())
    assert len(losses) == 3
    assert all(loss == pytest.approx(expected, rel=0.05) for loss in losses)


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_those_of_the_cpu(name: str) -> None:
    model = built(name, "fusion=off", device="cpu").eval()
    prompt_BT = torch.arange(6).view(2, 3)
    right = model.generate(prompt_BT, 12, temperature=0.0)
    got = model.to(DEVICE).generate(prompt_BT.to(DEVICE), 12, temperature=0.0)
    assert torch.equal(got.cpu(), right)


def test_explain_of_a_model() -> None:
    model = built("gpt_nano", "fusion=off")
    report = explain(model, *inputs_of(model), compress="int8")
    assert max(report.gradient_errors.values()) < 0.05


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "vit", "t5", "opt", "gemma2", "qwen3"])
def test_a_swapped_model_has_the_loss_of_the_original(family: str) -> None:
    from tests.components.swap.models import FAMILIES, batch_for, loss_of

    torch.manual_seed(0)
    plain = FAMILIES[family][0](4).to(DEVICE).eval()
    batch = {name: value.to(DEVICE) for name, value in batch_for(family, scale=4).items()}
    if "use_cache" in inspect.signature(plain.forward).parameters:
        batch["use_cache"] = False
    swapped = copy.deepcopy(plain)
    report = fuselayers.swap(swapped, batch=batch)
    assert report.sites
    torch.testing.assert_close(loss_of(swapped, batch), loss_of(plain, batch), rtol=1e-4, atol=0.0)
    loss_of(swapped.train(), batch).backward()
    assert all(parameter.grad is not None for parameter in swapped.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("fusion", ["off", "inductor"])
def test_a_run_of_training_stops_and_goes_on(fusion: str, tmp_path: Path) -> None:
    folder = f"train.output={tmp_path / 'run'}"
    assert main(["train", "gpt_nano", "train=quick", f"fusion={fusion}", "train.steps=20", folder]) == 0
    assert main(["train", f"train.resume={tmp_path / 'run'}", "train.steps=30"]) == 0
