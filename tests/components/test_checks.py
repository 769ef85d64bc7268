import pytest

from fuselayers.components.checks import check_positive


@pytest.mark.parametrize("value", [0, -3])
def test_a_size_is_at_least_one(value: int) -> None:
    check_positive("num_heads", 1)
    with pytest.raises(ValueError, match=rf"^num_heads must be at least 1, got {value}$"):
        check_positive("num_heads", value)
