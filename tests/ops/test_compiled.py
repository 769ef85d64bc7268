from functools import partial
from typing import Any

import pytest
import torch

from fuselayers import ops
from fuselayers.ops.compiled import compiled, why_not_compiled
from fuselayers.ops.launch import INTERPRETED
from fuselayers.partition import BackendUnavailableError, saved_bytes
from fuselayers.partition.compilers import why_inductor_is_unavailable
from tests.ops.cases import CASES
from tests.ops.contract import assert_as_good_as, check_layouts, check_single_gradients, tensors

pytestmark = pytest.mark.skipif(
    INTERPRETED or why_inductor_is_unavailable("cpu") is not None, reason="Inductor has no C++ compiler here"
)
FEW = (
    "dropout",
    "bias_activation_dropout, gelu",
    "bias_dropout_residual",
    "gated_activation, packed",
    "layer_norm",
    "bias_dropout_residual_layer_norm, prenorm",
    "bias_dropout_residual_rms_norm, pre",
)
WITH_ONE = tuple(name for name in CASES if any(name.startswith(few.split(",")[0]) for few in FEW) or "norm" in name)
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in WITH_ONE]
)


def compiled_form(name: str) -> Any:
    return partial(CASES[name].op, backend="inductor")


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_compiled_form_matches_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = tensors(*case.shapes((2, 3, 129)), dtype=dtype)
    assert_as_good_as(compiled_form(name), case.reference, inputs, **case.options)


@pytest.mark.parametrize("name", ["bias_activation_dropout, gelu", "bias_dropout_residual_layer_norm, prenorm"])
@pytest.mark.parametrize("check", [check_layouts, check_single_gradients])
def test_contract(check: Any, name: str) -> None:
    case = CASES[name]
    check(compiled_form(name), case.reference, tensors(*case.shapes((6, 9))), **case.options)


@names
def test_it_keeps_what_the_kernels_keep(name: str) -> None:
    case = CASES[name]
    inputs = [value.requires_grad_() for value in tensors(*case.shapes((64, 128)))]
    vectors = [value for value in inputs if value.dim() == 1]
    kept = saved_bytes(partial(compiled_form(name), **case.options), *inputs, parameters=vectors)
    rows = 64 * 2 * 4
    assert case.kept * inputs[0].nbytes <= kept <= case.kept * inputs[0].nbytes + rows + 8


@pytest.mark.parametrize("name", FEW)
def test_it_may_be_differentiated_twice(name: str) -> None:
    case = CASES[name]

    def second(form: Any) -> list[torch.Tensor]:
        inputs = [value.requires_grad_() for value in tensors(*case.shapes((3, 5)))]
        outputs = form(*inputs, **case.options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = torch.stack([out.square().sum() for out in outputs]).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return list(torch.autograd.grad(sum((one.square().sum() for one in first), start=first[0].sum()), inputs))

    for got, expected in zip(second(compiled_form(name)), second(case.reference), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_it_takes_nothing_from_the_generator() -> None:
    x = torch.randn(3, 17, requires_grad=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seed = torch.tensor(4)
    ops.bias_activation_dropout(x, activation="silu", p=0.5, seed=seed, backend="inductor").sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_options_get_code_of_their_own() -> None:
    def power(x: torch.Tensor, exponent: int) -> torch.Tensor:
        return x**exponent

    of_power = compiled(power)
    x = torch.tensor([2.0, 3.0])
    assert of_power(x, 2).tolist() == [4.0, 9.0]
    assert of_power(x, 3).tolist() == [8.0, 27.0]


def test_autocast_does_not_reach_it() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(square)(torch.eye(2)).dtype == torch.float32


def test_where_it_cannot_be_asked_for() -> None:
    assert why_not_compiled(torch.device("cpu")) is None
    reason = r"an op's own form on cuda is 'triton'; to compile it there, fuse\(op, backend='inductor'\)"
    assert why_not_compiled(torch.device("cuda")) == reason.replace("\\", "")
    form = partial(ops.gated_activation, backend="inductor")
    with pytest.raises(BackendUnavailableError, match=r"^backend 'inductor' cannot run here: an op's own form on meta"):
        form(torch.ones(2, 8, device="meta"))
    with pytest.raises(RuntimeError, match=r"^backend 'inductor' cannot take this call: inside a transform"):
        torch.vmap(form)(torch.ones(3, 2, 8))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselayers.ops.compiled.why_inductor_is_unavailable", lambda device: "no g++ here")
    with pytest.raises(BackendUnavailableError, match=r"cannot run here: no g\+\+ here; or leave it to backend='auto'"):
        ops.dropout(torch.ones(2, 8), 0.5, backend="inductor")
    y = ops.dropout(torch.ones(2, 8), 0.5, seed=torch.tensor(7))
    assert y.count_nonzero() == 10
