import pytest
import torch

from fuselayers.ops.losses import check_loss_options, check_target, count_for, loss_dtype, reduced

CPU = torch.device("cpu")


def test_a_mean_is_over_the_rows_that_count() -> None:
    losses, target = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([4, -100, 0])
    count = count_for("mean", target, -100)
    assert count is not None
    assert count.item() == 2
    assert reduced(losses, count, "mean", torch.float32).item() == 3.0
    for reduction in ("sum", "none"):
        assert count_for(reduction, target, -100) is None
    assert reduced(losses, None, "sum", torch.bfloat16).dtype == torch.bfloat16
    assert reduced(losses, None, "none", torch.float32) is losses


def test_the_dtype_of_a_loss() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert loss_dtype(dtype, CPU) == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss_dtype(torch.bfloat16, CPU) == torch.float32
        assert loss_dtype(torch.float16, CPU) == torch.float32
        assert loss_dtype(torch.float64, CPU) == torch.float64


def test_errors_of_a_target() -> None:
    rows = torch.zeros(2, 3, 5)
    check_target(torch.zeros(2, 3, dtype=torch.int64), "logits", rows)
    with pytest.raises(TypeError, match=r"^target must be an int64 tensor, got list$"):
        check_target([1], "logits", rows)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^target must hold class indices in int64, got torch.float32; class probabil"):
        check_target(rows, "logits", rows)
    with pytest.raises(TypeError, match=r"got torch.int32; convert it with .long\(\)$"):
        check_target(torch.zeros(2, 3, dtype=torch.int32), "logits", rows)
    with pytest.raises(ValueError, match=r"^target must be \[2, 3\] to fit x \[2, 3, 5\], got \[2\]$"):
        check_target(torch.zeros(2, dtype=torch.int64), "x", rows)
    with pytest.raises(ValueError, match=r"^target must be on x's device cpu, got meta; move it with .to\(x.device\)$"):
        check_target(torch.zeros(2, 3, dtype=torch.int64, device="meta"), "x", rows)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ((0.5, 0.0, 0.0, "mean"), TypeError, "ignore_index must be an int, got float"),
        ((0, torch.tensor(0.1), 0.0, "mean"), TypeError, "label_smoothing must be a number, got a tensor; pass label_"),
        ((0, "much", 0.0, "mean"), TypeError, "label_smoothing must be a number, got str"),
        ((0, 1.5, 0.0, "mean"), ValueError, "label_smoothing must satisfy 0 <= label_smoothing <= 1, got 1.5"),
        ((0, 0.0, float("inf"), "mean"), ValueError, "z_loss must be finite and not negative, got inf"),
        ((0, 0.0, 0.0, "avg"), ValueError, "no reduction 'avg'; there are: mean, none, sum"),
    ],
)
def test_errors_of_options(options: tuple[object, ...], kind: type[Exception], text: str) -> None:
    check_loss_options(-100, 0, 1, "none")
    with pytest.raises(kind) as raised:
        check_loss_options(*options)  # type: ignore[arg-type]
    assert str(raised.value).startswith(text)
