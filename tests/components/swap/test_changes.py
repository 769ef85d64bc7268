"""Changes that users make after `swap` and before it: layers, parameters, adapters, copies, dtypes, devices."""

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fuselayers.components.swap import fallbacks, unswap
from fuselayers.partition import FusedModule, fuse
from tests.components.compare import assert_same_values
from tests.components.swap.levels import both_levels, bytes_of, classes, gradients, pair, swap_at
from tests.components.swap.models import FAMILIES, batch_for, loss_of


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Each linear layer of the blocks' feedforwards, with its parent and its name there."""
    layers = [
        (parent, key, child)
        for name, parent in model.named_modules()
        for key, child in parent.named_children()
        if type(child) is nn.Linear and name.endswith(("mlp", "output", "intermediate"))
    ]
    assert layers
    return layers


def weight_norm(model: nn.Module) -> nn.Module:
    for _, _, layer in linears(model):
        parametrizations.weight_norm(layer)
    return model


def dynamically_quantised(model: nn.Module) -> nn.Module:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch cannot compute with quantised layers")
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def kept_elsewhere(model: nn.Module) -> nn.Module:
    """Offload the weights: Accelerate's hooks load each layer's weights for its call, and drop them afterwards."""
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """Add adapters with random weights: peft's own start as zeros."""
    peft = pytest.importorskip("peft")
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.1)
    return adapted


def with_merged_adapters(model: nn.Module) -> nn.Module:
    return with_adapters(model).merge_and_unload().requires_grad_()


def with_more_tokens(model: nn.Module) -> nn.Module:
    model.resize_token_embeddings(120, mean_resizing=False)
    return model


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict({key: 1.1 * value for key, value in model.state_dict().items()}, assign=True)
    return model


def wide(model: nn.Module) -> nn.Module:
    return model.to(torch.float64)


def pickled(model: nn.Module) -> nn.Module:
    other: nn.Module = pickle.loads(pickle.dumps(model))
    assert classes(other) == classes(model)
    return other


CHANGES: tuple[Callable[[nn.Module], nn.Module], ...] = (
    *(weight_norm, dynamically_quantised, kept_elsewhere, with_adapters, with_merged_adapters, with_more_tokens),
    *(assigned, wide, copy.deepcopy, pickled),
)


def results(model: nn.Module, name: str, *, trains: bool) -> dict[str, torch.Tensor]:
    """Logits, and the loss and gradients of training."""
    batch = batch_for(name)
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    return {"logits": logits} | (gradients(model.train(), batch) if trains else {})


# Llama at level layers runs every day. BERT has biases and post norms, GPT-2 transposed and tied weights.
@both_levels
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2"))])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_results_are_those_of_the_plain_model(
    name: str, change: Callable[[nn.Module], nn.Module], before: bool, level: str
) -> None:
    if name == "gpt2" and change is weight_norm:
        pytest.skip("its layers are of another class")
    models = []
    for model in pair(name, level):
        if before:
            unswap(model)
        torch.manual_seed(4)
        models.append(change(model))
    if before:
        swap_at(level, models[1])
    trains = change not in (dynamically_quantised, kept_elsewhere)
    wanted, got = (results(model, name, trains=trains) for model in models)
    assert_same_values(wanted, got)
    unswap(models[1])
    wanted, got = (results(model, name, trains=trains) for model in models)
    assert_same_values(wanted, got)


def test_layers_that_have_changed_are_named_and_plain_ones_fused_again() -> None:
    _, swapped = pair("llama", "layers")
    torch.manual_seed(4)
    adapted = with_adapters(swapped)
    loss_of(adapted, batch_for("llama"))
    # The adapters are in MLPs and attentions; norms stay fused.
    assert {skipped.name.rpartition(".")[2] for skipped in fallbacks(adapted)} == {"mlp"}
    again = copy.deepcopy(adapted.merge_and_unload())
    loss_of(again, batch_for("llama"))
    assert fallbacks(again) == ()


def test_a_parametrization_of_a_swapped_norm_stays_in_unswap() -> None:
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    plain, swapped = pair("llama", "layers")
    batch, wanted = batch_for("llama"), []
    for model in (plain, swapped):
        nn.utils.parametrize.register_parametrization(model.model.norm, "weight", Twice())
        wanted.append(gradients(model, batch))
    assert_same_values(*wanted)
    unswap(swapped)
    assert_same_values(wanted[0], gradients(swapped, batch))
    for model in (plain, swapped):
        nn.utils.parametrize.remove_parametrizations(model.model.norm, "weight")
    assert classes(swapped) == classes(plain)


@both_levels
def test_a_model_without_memory_gets_it_after_swap(level: str) -> None:
    plain, _ = pair("llama", level)
    with torch.device("meta"):
        model = FAMILIES["llama"][0]().train()
    assert swap_at(level, model).sites
    model = model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict(), strict=True)
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        for key, buffer in other.named_buffers(recurse=False):
            module.get_buffer(key).copy_(buffer)  # a state_dict lacks some, such as rotary frequencies
    assert_same_values(gradients(plain, batch_for("llama")), gradients(model, batch_for("llama")))


# Three kinds of weights: tied and transposed, with biases, and without biases.
@pytest.mark.parametrize("level", ["layers", "blocks"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_unswap_gives_every_byte_back(name: str, level: str) -> None:
    plain, model = pair(name, level)
    unswap(model)
    held = [dict(module.__dict__) for module in model.modules()]
    before, kinds = bytes_of(model), classes(model)
    swap_at(level, model, verify=level == "layers", batch=batch_for(name))
    assert bytes_of(model) == before
    assert unswap(model) > 0
    assert bytes_of(model) == before == bytes_of(plain)
    assert classes(model) == kinds == classes(plain)
    for module, kept in zip(model.modules(), held, strict=True):
        assert module.__dict__.keys() == kept.keys()
        assert all(module.__dict__[key] is value for key, value in kept.items())


def test_another_model_of_the_same_type_is_not_swapped(tmp_path: Path) -> None:
    plain, swapped = pair("llama", "layers")
    swapped.save_pretrained(tmp_path)
    for other in (type(swapped)(swapped.config), type(swapped).from_pretrained(tmp_path)):
        assert classes(other) == classes(plain)
    assert inspect.signature(type(swapped)) == inspect.signature(type(plain))


def test_a_copy_without_a_constructor_is_swapped() -> None:
    """`DataParallel` and Accelerate's regional compilation copy with `cls.__new__(cls)`."""
    _, swapped = pair("llama", "layers")
    assert [type(module._replicate_for_data_parallel()) for module in swapped.modules()] == classes(swapped)


def test_copies_of_a_subclass_of_a_swapped_class() -> None:
    _, swapped = pair("llama", "layers")
    norm = swapped.model.norm
    assert isinstance(copy.deepcopy(fuse(norm, backend="eager")), FusedModule)
    norm.__class__ = type("Own", (type(norm),), {})
    assert type(copy.deepcopy(norm)) is type(norm)
