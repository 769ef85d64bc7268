import pytest
import torch

from fuselayers.ops.shapes import check_like, check_row_vector

X = torch.ones(3, 5)


def test_what_fits_passes() -> None:
    check_row_vector("bias", None, X)
    check_row_vector("bias", torch.ones(5), X)
    check_like("residual", torch.ones(3, 5), X)


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
