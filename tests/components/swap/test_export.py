"""`torch.export` and `torch.compile` of swapped models, as far as they take the plain ones."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.swap import unswap
from tests.components.swap.levels import assert_same, batch_for, both_levels, gradients, pair

families = pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt2", "bert", "vit"))]
)


def inputs(name: str) -> dict[str, Any]:
    """What a model is exported with: no labels, and no cache as a result."""
    batch: dict[str, Any] = {key: value for key, value in batch_for(name).items() if key != "labels"}
    return batch | ({"use_cache": False} if name in ("llama", "gpt2") else {})


def exported(model: nn.Module, name: str, *, strict: bool) -> torch.export.ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (), inputs(name), strict=strict)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@families
@both_levels
def test_it_exports_as_the_plain_model(name: str, level: str, strict: bool) -> None:
    plain, swapped = pair(name, level, train=False)
    wanted = exported(plain, name, strict=strict)
    got = exported(swapped, name, strict=strict)
    assert set(got.state_dict) == set(wanted.state_dict)
    given = inputs(name)
    torch.testing.assert_close(got.module()(**given).logits, plain(**given).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@families
@both_levels
def test_compiling_breaks_no_graph_more_than_before(name: str, level: str) -> None:
    plain, swapped = pair(name, level)
    batch = batch_for(name)

    def breaks(model: nn.Module) -> tuple[int, int]:
        torch.compiler.reset()
        explained = torch._dynamo.explain(model)(**batch)
        return explained.graph_break_count, explained.graph_count

    before, after = breaks(plain), breaks(swapped)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


@pytest.mark.slow
@families
@both_levels
def test_a_compiled_model_computes_the_same(name: str, level: str) -> None:
    plain, swapped = pair(name, level)
    batch = batch_for(name)
    wanted = gradients(plain, batch)
    swapped.compile(backend="aot_eager")
    assert_same(gradients(swapped, batch), wanted)
    assert unswap(swapped) > 0
    assert_same(gradients(swapped, batch), wanted)


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5", "opt", "bloom"])
def test_a_model_compiled_by_inductor_computes_the_same(name: str) -> None:
    plain, swapped = pair(name, "layers")
    wanted = gradients(plain, batch_for(name))
    swapped.compile()
    assert_same(gradients(swapped, batch_for(name)), wanted)
