from dataclasses import replace

import pytest
import torch

from fuselayers import ops
from fuselayers.cli.bench.cases import OPS, Settings, op_case
from fuselayers.ops import NormStyle
from tests.ops.cases import CASES

_SETTINGS = Settings((2, 7, 64), torch.float32, torch.device("cpu"), dropout=0.0)


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_plain_form_computes_what_the_op_computes_from_tensors_of_their_own(name: str) -> None:
    case = op_case(name, _SETTINGS)
    got, wanted = case.op(**case.tensors, **case.options), case.plain(**case.tensors, **case.options)
    torch.testing.assert_close(got, wanted)
    tensors = list(case.tensors.values())
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    floats = [tensor for key, tensor in case.tensors.items() if key not in ("cos", "sin", "target")]
    assert all(tensor.requires_grad for tensor in floats)
    assert not any(torch.equal(left, right) for left in tensors for right in tensors if left is not right)


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
def test_the_floor_is_what_the_meter_of_the_kernels_checks(style: NormStyle) -> None:
    compared = 0
    for name in OPS:
        metered = next((CASES[key] for key in (f"{name}, {style}", f"{name}, gelu", name) if key in CASES), None)
        if metered is not None:
            compared += 1
            assert op_case(name, replace(_SETTINGS, dropout=0.1, style=style)).floor == metered.floor, name
    assert compared == 10


def test_every_op_of_the_library_can_be_timed() -> None:
    helpers = {
        "check_activation",
        "check_probability",
        "check_style",
        "draw_seed",
        "keep_mask",
        "keep_scale",
        "linear_log_prob",  # torch's only counterpart computes all logits
        *("softmax", "log_softmax"),  # these run plain torch
    }
    functions = {name for name in vars(ops) if callable(getattr(ops, name)) and name.islower()}
    assert set(OPS) == {name for name in functions - helpers if not name.startswith("_")}


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"no op 'dropuot'; did you mean 'dropout'\? there are: activate, attention"):
        op_case("dropuot", _SETTINGS)
    for changed, text in (
        ({"shape": (4, 64)}, "rotary needs a shape BATCHxTOKENSxWIDTH whose width is a multiple of 64"),
        ({"shape": (2, 4, 65)}, "rotary needs a shape BATCHxTOKENSxWIDTH whose width is a multiple of 64"),
        ({"dropout": 1.5}, r"dropout probability p must satisfy 0 <= p <= 1, got 1\.5"),
        ({"activation": "galu"}, "no activation 'galu'; did you mean 'gelu'"),
    ):
        with pytest.raises(ValueError, match=text):
            op_case("rotary", replace(_SETTINGS, **changed))
