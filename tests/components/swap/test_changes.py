"""What users do to a swapped model: other layers, parametrizations, optimizers, averages, memory on another device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fuselayers.components.swap import fallbacks, swap, unswap
from tests.components.swap.levels import (
    assert_same,
    batch_for,
    both_levels,
    bytes_of,
    classes,
    gradients,
    loss_of,
    pair,
    swap_at,
)


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Each linear layer of the blocks' feedforwards, with its parent and its name there."""
    return [
        (parent, key, child)
        for name, parent in model.named_modules()
        for key, child in parent.named_children()
        if type(child) is nn.Linear and name.endswith(("mlp", "output", "intermediate"))
    ]


@both_levels
@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_parametrized_layers(change: Callable[[nn.Module], Any], level: str) -> None:
    plain, swapped = pair("llama", level)
    results = []
    for model in (plain, swapped):
        torch.manual_seed(8)
        for _, _, layer in linears(model):
            change(layer)
        results.append(gradients(model, batch_for("llama")))
    assert_same(results[1], results[0])


def test_a_parametrization_of_a_swapped_norm_stays_in_unswap() -> None:
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    plain, swapped = pair("llama", "layers")
    batch, results = batch_for("llama"), []
    for model in (plain, swapped):
        norm: Any = model.model.norm  # type: ignore[union-attr]
        nn.utils.parametrize.register_parametrization(norm, "weight", Twice())
        results.append(gradients(model, batch))
    assert_same(results[1], results[0])
    unswap(swapped)
    assert_same(gradients(swapped, batch), results[0])
    for model in (plain, swapped):
        nn.utils.parametrize.remove_parametrizations(model.model.norm, "weight")  # type: ignore[union-attr, arg-type]
    assert classes(swapped) == classes(plain)


class Int8Linear(nn.Linear):
    """A quantised layer as libraries make them: a subclass, with weights of eight bits."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)  # type: ignore[operator]


def eight_bits(model: nn.Module) -> nn.Module:
    for parent, key, layer in linears(model):
        setattr(parent, key, Int8Linear(layer))
    return model


def dynamic(model: nn.Module) -> nn.Module:
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return quantised


@both_levels
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("quantise", [eight_bits, dynamic])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_quantised_layers(quantise: Callable[[nn.Module], nn.Module], name: str, level: str) -> None:
    if quantise is dynamic and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch cannot compute with quantised layers")
    plain, swapped = pair(name, level, train=False)
    plain, swapped = quantise(plain), quantise(swapped)
    batch = batch_for(name)
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits, swapped(**batch).logits)
        assert level == "blocks" or len(fallbacks(swapped)) >= 2
    assert unswap(swapped) > 0
    # And one that is quantised before.
    swap_at(level, plain)
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch).logits, swapped(**batch).logits, atol=1e-5, rtol=1e-5)


@both_levels
def test_an_optimizer_that_was_made_before(level: str) -> None:
    plain, _ = pair("gpt2", level)
    other, batch = copy.deepcopy(plain), batch_for("gpt2")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, other)]
    losses: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for step in range(6):
        if step == 2:
            swap_at(level, other)
        if step == 4:
            assert unswap(other) > 0
        for model, optimizer, kept in zip((plain, other), optimizers, losses, strict=True):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]), atol=0.0, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


@both_levels
def test_an_average_of_the_weights(level: str) -> None:
    plain, swapped = pair("llama", level)
    batch, results = batch_for("llama"), []
    for model in (plain, swapped):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        results.append(gradients(average, batch))
    assert_same(results[1], results[0])
    assert unswap(average) > 0
    assert_same(gradients(average, batch), results[0])


@both_levels
def test_calls_with_other_parameters(level: str) -> None:
    plain, swapped = pair("llama", level)
    batch = batch_for("llama")
    given = {name: (one.detach() * 1.1).requires_grad_() for name, one in plain.named_parameters()}
    results = []
    for model in (plain, swapped):
        loss = torch.func.functional_call(model, given, kwargs=batch).loss
        results.append(dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True)))
    assert_same(results[1], results[0])
    assert fallbacks(swapped) == ()


def test_gradients_of_each_sample_of_a_batch() -> None:
    plain, swapped = pair("llama", "layers")
    given = {name: one.detach() for name, one in plain.named_parameters()}
    ids = torch.randint(3, 99, (3, 1, 12))
    results = []
    for model in (plain.model, swapped.model):  # type: ignore[union-attr]
        own = {name.removeprefix("model."): one for name, one in given.items() if name.startswith("model.")}

        def loss(some: dict[str, torch.Tensor], one: torch.Tensor, model: Any = model) -> torch.Tensor:
            hidden = torch.func.functional_call(model, some, (one,), {"use_cache": False}).last_hidden_state
            return hidden.square().mean()

        results.append(torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, ids))
    assert_same(results[1], results[0])


@both_levels
@pytest.mark.parametrize("before", [False, True])
def test_weights_kept_elsewhere(level: str, before: bool) -> None:
    """Accelerate's hooks bring each layer's weights for its own call, and take them away."""
    accelerate = pytest.importorskip("accelerate")
    plain, swapped = pair("llama", level, train=False)
    batch, keys = batch_for("llama"), list(plain.state_dict())
    with torch.no_grad():
        expected = plain(**batch).logits
        if before:
            unswap(swapped)
        accelerate.cpu_offload(swapped, execution_device=torch.device("cpu"))
        if before:
            swap_at(level, swapped)
        assert all(one.device.type == "meta" for one in swapped.parameters())
        torch.testing.assert_close(swapped(**batch).logits, expected, atol=1e-5, rtol=1e-5)
        assert all(one.device.type == "meta" for one in swapped.parameters())
        accelerate.hooks.remove_hook_from_submodules(swapped)
        assert list(swapped.state_dict()) == keys
        torch.testing.assert_close(swapped(**batch).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # there is no such device
def test_a_plan_of_devices_keeps_blocks_whole() -> None:
    accelerate = pytest.importorskip("accelerate")
    most = {0: 80_000, "cpu": 10_000_000}  # bytes: one block and a half
    plans = []
    for model in pair("llama", "blocks"):
        kinds: Any = model._no_split_modules
        plans.append(accelerate.infer_auto_device_map(model, max_memory=most, no_split_module_classes=kinds))
    assert plans[0] == plans[1]
    assert set(plans[1].values()) == {0, "cpu"}
    assert not any(name.startswith("model.layers.") and name.count(".") > 2 for name in plans[1]), plans[1]


def test_accelerate_prepares_and_gives_back() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, swapped = pair("gpt2", "layers")
    batch, results, before = batch_for("gpt2"), [], bytes_of(swapped)
    for model in (plain, swapped):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(4):
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().float())
        results.append(torch.stack(losses))
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    torch.testing.assert_close(results[1], results[0], atol=0.0, rtol=1e-2)
    assert bytes_of(swapped) != before
    assert unswap(swapped) > 0
    assert classes(swapped) == classes(plain)
    # Accelerate leaves the forward that it found in the module itself.
    assert swapped.__dict__["forward"].__func__ is plain.__dict__["forward"].__func__
    assert swapped(**batch).logits is not None


@pytest.mark.parametrize("level", ["layers", "blocks"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_unswap_gives_every_byte_back(name: str, level: str) -> None:
    plain, model = pair(name, level)
    batch = batch_for(name)
    unswap(model)
    held = [dict(one.__dict__) for one in model.modules()]
    before, kinds = bytes_of(model), classes(model)
    options: Any = {"level": level, **({"backend": "eager"} if level == "blocks" else {})}
    swap(model, **options, verify=level == "layers", batch=batch)
    assert bytes_of(model) == before
    assert unswap(model) > 0
    assert bytes_of(model) == before == bytes_of(plain)
    assert classes(model) == kinds == classes(plain)
    for one, kept in zip(model.modules(), held, strict=True):
        assert one.__dict__.keys() == kept.keys()
        assert all(one.__dict__[key] is value for key, value in kept.items())
