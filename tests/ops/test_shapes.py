import pytest
import torch

from fuselayers.ops.shapes import check_floating, check_like, check_linear, check_row_vector, check_rows

X = torch.ones(3, 5)


def test_what_fits_passes() -> None:
    check_row_vector("bias", None, X)
    check_row_vector("bias", torch.ones(5), X)
    check_like("residual", torch.ones(3, 5), X)
    check_rows("x", X)
    check_linear(X, torch.ones(4, 5), None)
    check_linear(X, torch.ones(4, 5), torch.ones(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_linear(X, torch.ones(4, 5).bfloat16(), torch.ones(4).half())
    check_floating("x", X[0, 0].bfloat16())


@pytest.mark.parametrize("shape", [(3,), (1, 5), ()])
def test_a_row_vector_has_one_value_per_column(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"^weight must be \[5\] to fit x \[3, 5\], got \[{', '.join(map(str, shape))}\]$"
    ):
        check_row_vector("weight", torch.ones(shape), X)


def test_a_second_input_is_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[3, 5\], got \[1, 5\]$"):
        check_like("residual", torch.ones(1, 5), X)


def test_devices_must_agree() -> None:
    elsewhere = torch.ones(3, 5, device="meta")
    with pytest.raises(ValueError, match=r"^up must be on x's device cpu, got meta; move it with .to\(x.device\)$"):
        check_like("up", elsewhere, X)
    with pytest.raises(ValueError, match=r"^bias must be on x's device cpu, got meta; move it with .to\(x.device\)$"):
        check_row_vector("bias", elsewhere[0], X)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_must_be_floating(dtype: torch.dtype) -> None:
    text = rf"^cos must be a floating-point tensor, got {dtype}; convert it, for example with .float\(\)$"
    for check in (
        check_floating,
        check_rows,
        lambda *args: check_row_vector(*args, X),
        lambda *args: check_like(*args, X),
    ):
        with pytest.raises(TypeError, match=text):
            check("cos", torch.ones(5, dtype=dtype))
    with pytest.raises(TypeError, match=r"^cos must be a floating-point tensor, got float$"):
        check_floating("cos", 1.0)


def test_rows_have_a_last_dimension() -> None:
    text = r"^gate must be \[..., N\], got a tensor without dimensions; give it one with .reshape\(1\)$"
    with pytest.raises(ValueError, match=text):
        check_rows("gate", torch.tensor(1.0))


def test_a_linear_layers_tensors_fit() -> None:
    weight, bias = torch.ones(4, 5), torch.ones(4)
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        check_linear(X[0, 0], weight, None)
    for wrong in (torch.ones(5, 4), torch.ones(5)):
        with pytest.raises(ValueError, match=r"^weight must be \[V, 5\] to fit x \[3, 5\], got \[5(, 4)?\]$"):
            check_linear(X, wrong, None, letter="V")
    with pytest.raises(ValueError, match=r"^bias must be \[4\] to fit weight \[4, 5\], got \[5\]$"):
        check_linear(X, weight, torch.ones(5))
    for name, tensors in (("weight", (weight.to("meta"), bias)), ("bias", (weight, bias.to("meta")))):
        with pytest.raises(ValueError, match=rf"^{name} must be on x's device cpu, got meta; move it with .to\(x.dev"):
            check_linear(X, *tensors)
    text = r"must have x's dtype torch.float32, got torch.bfloat16; convert it, or call under torch.autocast$"
    for name, tensors in (("weight", (weight.bfloat16(), bias)), ("bias", (weight, bias.bfloat16()))):
        with pytest.raises(TypeError, match=rf"^{name} {text}"):
            check_linear(X, *tensors)
    for name, tensors in (("weight", (weight.long(), bias)), ("bias", (weight, bias.long()))):
        with pytest.raises(TypeError, match=rf"^{name} must be a floating-point tensor, got torch.int64; convert it"):
            check_linear(X, *tensors)
