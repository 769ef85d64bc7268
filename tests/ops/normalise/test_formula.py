import pytest
import torch

from fuselayers.ops.normalise import check_style, norm_formula, norm_reference
from tests.ops.contract import tensors


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_the_formula_is_the_reference_in_the_dtype_of_its_input(
    dtype: torch.dtype, parameters: torch.dtype, rms: bool
) -> None:
    s, weight, norm_bias = tensors((3, 21), (21,), (21,))
    s, weight, norm_bias = s.to(dtype), weight.to(parameters), norm_bias.to(parameters)
    shift = None if rms else norm_bias
    got = norm_formula(s, weight, shift, eps=1e-5, rms=rms)
    assert got.dtype == dtype
    expected = norm_reference(s.double(), weight.double(), None if shift is None else shift.double(), eps=1e-5, rms=rms)
    torch.testing.assert_close(got.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 8)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"^norm style must be a name, got a int$"):
        check_style(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^no norm style 'prenorn'; did you mean 'prenorm'\? there are: post, pre"):
        check_style("prenorn")
