"""Each rule under checkpoints, saved-tensor hooks, autocast and a compiler."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fuselayers.components.swap import swap
from tests.components.compare import assert_same_step, assert_same_values, run
from tests.components.swap.layers import DROPPING, LAYERS, inputs, layer, without_dropout

every_layer = pytest.mark.parametrize("name", LAYERS)
both_modes = pytest.mark.parametrize("training", [True, False])


def swapped(module: nn.Module, name: str) -> nn.Module:
    """Swap a module, and fail unless the layer's rule fits."""
    swap(module, level="layers", verify=False).require(LAYERS[name][1])
    return module


@every_layer
@both_modes
def test_the_same_results_and_gradients(name: str, training: bool) -> None:
    plain = without_dropout(layer(name)).train(training)
    fused = copy.deepcopy(plain)
    if name == "attention":  # the rule needs an attention that drops
        fused.dropout = 1e-9
    assert_same_step(plain, swapped(fused, name), *inputs(name), rtol=1e-4, atol=1e-5)


@every_layer
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_give_the_same_gradients(name: str, use_reentrant: bool) -> None:
    module, tensors = swapped(layer(name), name).train(), inputs(name)
    got = run(module, tensors, call=functools.partial(checkpoint, module, use_reentrant=use_reentrant))
    assert_same_values(run(module, tensors), got)


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
        assert_same_step(plain, fused, *tensors, rtol=4e-2, atol=4e-2)


@pytest.mark.slow
@every_layer
@both_modes
def test_a_compiler_sees_one_graph(name: str, training: bool) -> None:
    module, tensors = swapped(layer(name), name).train(training), inputs(name)
    torch.compiler.reset()  # all layers share a code object, of which torch compiles eight forms
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    got = run(module, tensors, call=compiled)
    if not (training and name in DROPPING):
        assert_same_values(run(module, tensors), got)


def test_a_swapped_module_can_be_scripted() -> None:
    module, (x,) = swapped(layer("sequence"), "sequence").eval(), inputs("sequence")
    torch.testing.assert_close(torch.jit.script(module)(x), module(x))
