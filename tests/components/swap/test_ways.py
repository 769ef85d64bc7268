"""Each rule under checkpoints, saved-tensor hooks, autocast and a compiler."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fuselayers.components.swap import swap
from tests.components.swap.layers import DROPPING, LAYERS, inputs, layer, without_dropout

every_layer = pytest.mark.parametrize("name", LAYERS)
both_modes = pytest.mark.parametrize("training", [True, False])


def swapped(module: nn.Module, name: str) -> nn.Module:
    """Swap a module, and fail unless the layer's rule fits."""
    swap(module, level="layers", verify=False).require(LAYERS[name][1])
    return module


def results(module: nn.Module, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The output and all gradients."""
    for tensor in (*tensors, *module.parameters()):
        tensor.grad = None
    y = module(*tensors)
    y.float().square().sum().backward()
    return [y.detach(), *(tensor.grad for tensor in (*tensors, *module.parameters()) if tensor.grad is not None)]


def assert_alike(got: list[Tensor], wanted: list[Tensor], **tolerances: float) -> None:
    assert len(got) == len(wanted)
    for value, right in zip(got, wanted, strict=True):
        assert value.dtype == right.dtype
        torch.testing.assert_close(value, right, **(tolerances or {"atol": 1e-5, "rtol": 1e-4}))


@every_layer
@both_modes
def test_the_same_results_and_gradients(name: str, training: bool) -> None:
    plain = without_dropout(layer(name)).train(training)
    tensors = inputs(name)
    wanted = results(plain, tensors)
    if name == "attention":  # the rule needs an attention that drops
        plain.dropout = 1e-9
    assert_alike(results(swapped(plain, name), tensors), wanted)


@every_layer
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_give_the_same_gradients(name: str, use_reentrant: bool) -> None:
    module, tensors = swapped(layer(name), name).train(), inputs(name)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *tensors: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, *tensors, use_reentrant=use_reentrant)
            return y

    torch.manual_seed(3)
    wanted = results(module, tensors)
    torch.manual_seed(3)
    assert_alike(results(Checkpointed(), tensors), wanted)


@every_layer
def test_a_checkpoint_frees_what_a_layer_has_saved(name: str) -> None:
    module, tensors = swapped(layer(name), name).train(), inputs(name)
    held = [StorageWeakRef(x.untyped_storage()) for x in (*tensors, *module.parameters())]
    alive: list[Any] = []

    def drop(tensor: Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference not in held:
            alive.append(reference)

    with torch.autograd.graph.saved_tensors_hooks(drop, lambda _: torch.zeros(())):
        y = module(*tensors)
    own = StorageWeakRef(y.untyped_storage())
    assert [reference for reference in alive if not reference.expired() and reference != own] == []


@every_layer
@both_modes
def test_under_autocast(name: str, training: bool) -> None:
    plain, tensors = without_dropout(layer(name)).train(training), inputs(name)
    fused = without_dropout(swapped(layer(name), name)).train(training)
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(results(fused, tensors), results(plain, tensors), atol=4e-2, rtol=4e-2)


@pytest.mark.slow
@every_layer
@both_modes
def test_a_compiler_sees_one_graph(name: str, training: bool) -> None:
    module, tensors = swapped(layer(name), name).train(training), inputs(name)
    torch.compiler.reset()  # all layers share a code object, of which torch compiles eight forms
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    got = results(compiled, tensors)  # type: ignore[arg-type]
    if not (training and name in DROPPING):
        assert_alike(got, results(module, tensors))


def test_a_swapped_module_can_be_scripted() -> None:
    module, (x,) = swapped(layer("sequence"), "sequence").eval(), inputs("sequence")
    torch.testing.assert_close(torch.jit.script(module)(x), module(x))
