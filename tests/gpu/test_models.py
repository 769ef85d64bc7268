"""Whole models on a GPU: their numbers against the CPU's and, fused, against eager layers with the same masks."""

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import fuselayers
from fuselayers.cli.main import main
from fuselayers.components import MultiHeadAttention
from fuselayers.configs import choices
from fuselayers.partition import explain, saved_bytes
from tests.components.compare import run
from tests.ops.contract import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]
MODELS = [*(name for name in choices("model") if name.endswith("_tiny")), "gpt_nano", "hierarchical_vision"]
DECODERS = ["gpt_nano", "llama_tiny", "mixtral_tiny", "t5_tiny"]
EXAMPLES = 4
DROPOUT = "model.dropout=0.1"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def built(name: str, *overrides: str, device: torch.device | str = DEVICE) -> Any:
    torch.manual_seed(0)
    return fuselayers.build(name, overrides).to(device).train()


def inputs_of(model: Any, device: torch.device | str = DEVICE, *, seed: int = 2) -> list[Tensor]:
    """Random tokens, classes and pixels. Every vocabulary has the ten numbers that are used."""
    shapes = model.example_inputs(EXAMPLES, device="cpu")
    torch.manual_seed(seed)
    return [(torch.randn_like(part) if part.is_floating_point() else part.random_(10)).to(device) for part in shapes]


def loss_and_gradients(model: nn.Module, example: Sequence[Tensor]) -> list[Tensor]:
    """The loss and the gradients of all parameters, with the masks of seed 1."""
    torch.manual_seed(1)
    loss = model(*example)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_equal_but_for_rounding(got: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    """Compare the error of a gradient with its norm, or with 1% of the largest norm if that is more."""
    torch.testing.assert_close(got[0], wanted[0].to(got[0]), rtol=tolerance, atol=0.0)
    largest = max(float(gradient.norm()) for gradient in wanted[1:])
    for mine, right in zip(got[1:], wanted[1:], strict=True):
        error = float((mine - right.to(mine)).norm())
        assert error <= tolerance * max(float(right.norm()), 0.01 * largest)


@pytest.mark.parametrize("name", MODELS)
def test_eager_layers_have_the_numbers_of_the_cpu(name: str) -> None:
    """Without dropout, since GPU and CPU draw different seeds."""
    model = built(name, "fusion=off", device="cpu").eval()
    example = inputs_of(model, "cpu")
    right = loss_and_gradients(
        model.double(), [part.double() if part.is_floating_point() else part for part in example]
    )
    got = loss_and_gradients(copy.deepcopy(model).float().to(DEVICE), [part.to(DEVICE) for part in example])
    assert_equal_but_for_rounding([part.cpu() for part in got], right, 1e-3)


GRID = [
    *(("inductor", "block", name) for name in MODELS),
    *(("inductor", "model", name) for name in DECODERS),
    *((backend, "block", name) for backend in ("auto", "eager") for name in DECODERS),
    # torch 2.11 silently takes the formulas for this backend.
    *(("triton", "block", name) for name in DECODERS if TORCH >= (2, 12)),
]


@pytest.mark.filterwarnings("error::fuselayers.errors.FallbackWarning")
@pytest.mark.parametrize(("backend", "scope", "name"), GRID)
def test_a_fused_model_has_the_numbers_and_masks_of_its_layers(backend: str, scope: str, name: str) -> None:
    layers = built(name, "fusion=off", DROPOUT)
    fused = built(name, f"fusion={backend}", f"fusion.scope={scope}", DROPOUT)
    example = inputs_of(layers)
    assert_equal_but_for_rounding(loss_and_gradients(fused, example), loss_and_gradients(layers, example), 1e-3)


# Each decoder saves other values, and each format has a kernel that rounds and a kernel that restores.
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("compress", "tolerance"), [("bfloat16", 0.01), ("int8", 0.05), ("float8", 0.08)])
def test_saves_in_fewer_bits(name: str, compress: str, tolerance: float) -> None:
    exact = built(name, "fusion=inductor", DROPOUT)
    fused = built(name, "fusion=inductor", f"fusion.compress={compress}", DROPOUT)
    example = inputs_of(exact)
    got, wanted = loss_and_gradients(fused, example), loss_and_gradients(exact, example)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=0.0)
    assert_equal_but_for_rounding(got, wanted, tolerance)
    assert saved_bytes(fused, *example) < 0.8 * saved_bytes(exact, *example)


@pytest.mark.parametrize("name", DECODERS)
def test_ten_steps_under_autocast_have_the_losses_of_eager_layers(name: str) -> None:
    losses = []
    for fusion in ("off", "inductor"):
        model = built(name, f"fusion={fusion}", DROPOUT)
        example = inputs_of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(10):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(*example)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0][-1] < 0.9 * losses[0][0]


@pytest.mark.parametrize("fusion", ["off", "inductor"])
class TestCudaGraph:
    """`torch.cuda.make_graphed_callables`, in float32. The tests on the hollow driver run the example of the docs."""

    def graphed(self, model: nn.Module, example: Sequence[Tensor]) -> Any:
        return torch.cuda.make_graphed_callables(model, tuple(example))  # type: ignore[no-untyped-call]

    def test_a_replay_has_the_gradients_of_its_batch(self, fusion: str) -> None:
        model = built("gpt_nano", f"fusion={fusion}", "model.dropout=0")
        first, second = (inputs_of(model, seed=seed) for seed in (2, 3))
        wanted = loss_and_gradients(model, second)
        got = loss_and_gradients(self.graphed(model, first), second)
        assert_equal_but_for_rounding(got, wanted, 1e-3)

    def test_each_replay_has_new_masks(self, fusion: str) -> None:
        model = built("gpt_nano", f"fusion={fusion}", DROPOUT)
        example = inputs_of(model)
        expected = model(*example).item()
        graphed = self.graphed(model, example)
        losses = {graphed(*example).item() for _ in range(3)}
        assert len(losses) == 3
        assert all(loss == pytest.approx(expected, rel=0.05) for loss in losses)


@pytest.mark.parametrize("options", [{"window": 70}, {"soft_cap": 5.0}, {"sinks": True, "num_kv_heads": 2}], ids=str)
def test_flex_with_a_block_mask_is_right(options: dict[str, Any]) -> None:
    blocks = create_block_mask(lambda b, h, t, s: (t - s) % 3 < 2, None, None, 257, 257, device=DEVICE)
    place = torch.arange(257, device=DEVICE)
    allowed = (place[:, None] - place) % 3 < 2
    layer = MultiHeadAttention(128, num_heads=4, kernel="flex", **options).to(DEVICE, torch.bfloat16)
    plain = MultiHeadAttention(128, num_heads=4, kernel="plain", **options).to(DEVICE, torch.float64)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 257, 128, device=DEVICE, dtype=torch.bfloat16)
    expected, got = run(Masked(plain, allowed), [x.double()]), run(Masked(layer, blocks), [x])
    for name, value in expected.items():
        error = (got[name].double() - value).abs().max() / value.abs().max()
        assert error < 0.03, name


class Masked(nn.Module):
    """A layer with a mask."""

    def __init__(self, layer: nn.Module, mask: Any) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, mask=self.mask)


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
    assert 0 < max(report.gradient_errors.values()) < 0.05


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "vit", "t5", "opt", "gemma2", "qwen3"])
def test_a_swapped_model_has_the_loss_of_the_original_and_trains(family: str) -> None:
    from tests.components.swap.models import FAMILIES, batch_for, loss_of

    torch.manual_seed(0)
    plain = FAMILIES[family][0](4).to(DEVICE).eval()
    batch = {name: value.to(DEVICE) for name, value in batch_for(family, scale=4).items()}
    swapped = copy.deepcopy(plain)
    assert fuselayers.swap(swapped, batch=batch).sites
    # With a cache a block would run its original forward, in evaluation mode.
    without_cache = {"use_cache": False} if "use_cache" in inspect.signature(plain.forward).parameters else {}
    losses = [loss_of(model, batch | without_cache) for model in (swapped, plain)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0.0)
    before = [parameter.detach().clone() for parameter in swapped.parameters()]
    loss_of(swapped.train(), batch).backward()
    torch.optim.SGD(swapped.parameters(), lr=0.1).step()
    assert all(parameter.isfinite().all() for parameter in swapped.parameters())
    assert any(not torch.equal(*pair) for pair in zip(before, swapped.parameters(), strict=True))


@pytest.mark.parametrize("fusion", ["off", "inductor"])
def test_a_run_of_training_stops_and_goes_on(fusion: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(["train", "gpt_nano", "train=quick", f"fusion={fusion}", f"train.output={folder}"]) == 0
    assert main(["train", f"train.resume={folder}", "train.steps=30"]) == 0
    steps = [line.partition(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", *map(str, range(1, 31))]
