"""The matrix of checks passes right functions and layers, and a wrong one fails in its cell."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers import ops
from fuselayers.ops.residual_rms_norm import residual_rms_norm_reference
from fuselayers.testing import CHECKS, Cell, Report, check, check_module

EAGER: dict[str, Any] = {"backends": ["eager"]}


def failed(report: Report) -> set[tuple[str, str]]:
    return {(cell.check, cell.dtype) for cell in report.failures}


def test_an_op_of_ours() -> None:
    def op(x: Tensor, residual: Tensor, weight: Tensor, **options: float) -> tuple[Tensor, Tensor]:
        return ops.residual_rms_norm(x, residual, weight=weight, **options)

    def reference(x: Tensor, residual: Tensor, weight: Tensor, **options: float) -> tuple[Tensor, Tensor]:
        return residual_rms_norm_reference(x, residual, weight=weight, **options)

    float64: dict[str, Any] = {"dtypes": [torch.float64], **EAGER}
    report = check(op, reference, [(6, 9), (6, 9), (9,)], options={"eps": 1e-2}, **float64)
    report.raise_on_failure()
    assert {cell.check for cell in report.cells} == {*CHECKS, "fused, eager"}
    assert len(report.cells) == len(CHECKS) + 1
    assert [cell.check for cell in report.cells if cell.outcome == "n/a"] == []


def test_an_unknown_check_and_no_inputs() -> None:
    with pytest.raises(ValueError, match=r"^no check 'layout'; did you mean 'layouts'\? there are: NaN and infinity, "):
        check(torch.sin, torch.sin, [(3, 5)], checks=["layout"])
    with pytest.raises(ValueError, match=r"^inputs must be tensors or shapes, got none$"):
        check(torch.sin, torch.sin, [])


def test_what_the_reference_refuses_is_not_asked() -> None:
    def only_double(x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            raise TypeError("only double")
        return x * 2

    report = check(only_double, only_double, [(3, 5)], checks=["values and gradients"])
    assert [cell.outcome for cell in report.cells] == ["n/a", "n/a", "n/a", "pass"]
    assert report.cells[0].reason == "the reference raises TypeError: only double"
    refusing = check(only_double, lambda x: x * 2, [(3, 5)], checks=["values and gradients"], dtypes=[torch.float32])
    assert refusing.failures[0].reason == "raises TypeError: only double"


def test_a_reference_that_always_raises_makes_no_green_report() -> None:
    def broken(x: Tensor) -> Any:
        return x.no_such()

    names = ["values and gradients", "layouts"]
    with pytest.raises(AssertionError, match=r"(?s)^sin: 0 of 2 checks failed, 2 n/a\n.*gradients shows nothing\)$"):
        check(torch.sin, broken, [(3, 5)], checks=names, dtypes=[torch.float32]).raise_on_failure()
    misspelt = check(torch.sin, torch.sin, [(3, 5)], checks=names, options={"oot": None}, dtypes=[torch.float32])
    with pytest.raises(AssertionError, match=r"the reference raises TypeError: "):
        misspelt.raise_on_failure()
    with pytest.raises(AssertionError, match=r"^sin: 0 of 0 checks failed, 0 n/a"):
        check(torch.sin, torch.sin, [(3, 5)], checks=[]).raise_on_failure()


def test_an_op_that_overwrites_its_inputs_is_seen_and_gets_copies() -> None:
    def wipes(x: Tensor, *, scale: Tensor) -> Tensor:
        y = x * 2
        x.detach().zero_()
        scale.zero_()
        return y

    x, scale = torch.ones(6, 9), torch.tensor(2.0)
    options = {"scale": scale}
    names = [
        "values and gradients",
        "layouts",
        "single gradients",
        "mixed dtypes",
        "autocast",
        "unwritten memory",
        "double backward",
        "torch.func",
    ]
    report = check(wipes, lambda x, *, scale: x * 2, [x], checks=names, options=options, dtypes=[torch.float32])
    reasons = {cell.check: cell.reason for cell in report.failures}
    assert reasons == dict.fromkeys(names, "the forward overwrote input 0")
    assert bool(x.eq(1).all())
    assert scale == 2


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def test_a_layer_of_torch() -> None:
    module = nn.LayerNorm(9)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = check_module(module, layer_norm, [(6, 9)], dtypes=[torch.bfloat16], **EAGER)
    # Of two mixed dtypes, torch's layer norm refuses one order, and returns x's dtype in the other.
    assert {name for name, _ in failed(report)} == {"mixed dtypes"}
    assert str(report).startswith("LayerNorm: ")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_parameters_of_other_names() -> None:
    with pytest.raises(ValueError, match=r"^the reference's parameters must have the module's names weight, bias, got"):
        check_module(nn.LayerNorm(9), nn.RMSNorm(9), [(6, 9)])


def test_a_report_is_a_table_with_its_reasons() -> None:
    cells = [
        Cell("values", "float32", "pass"),
        Cell("values", "bfloat16", "FAIL", "y0: error 1, allowed 0"),
        Cell("second derivative", "float32", "pass", "raises RuntimeError: no"),
        Cell("second derivative", "bfloat16", "n/a", "has no second"),
    ]
    assert str(Report("my_norm", cells)).splitlines() == [
        "my_norm: 1 of 4 checks failed, 1 n/a",
        "",
        "                   float32   bfloat16",
        "values             pass      FAIL",
        "second derivative  pass      n/a",
        "",
        "FAIL  values (bfloat16): y0: error 1, allowed 0",
        "n/a   second derivative (bfloat16): has no second",
        "pass  second derivative (float32): raises RuntimeError: no",
    ]
    with pytest.raises(AssertionError, match=r"^my_norm: 1 of 4 checks failed, 1 n/a\n"):
        Report("my_norm", cells).raise_on_failure()
    Report("my_norm", cells[:1]).raise_on_failure()
