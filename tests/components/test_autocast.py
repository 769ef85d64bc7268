import pytest
import torch

from fuselayers.components.autocast import without_autocast


def test_arithmetic_keeps_the_dtypes_it_has_and_autocast_goes_on_after_it() -> None:
    # 257 needs nine bits, and bfloat16 has eight.
    x = torch.full((1, 1), 257.0)
    one = torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(x):
            assert (x @ one).item() == 257.0
        assert (x @ one).item() == 256.0


def test_the_meta_device_has_no_autocast_and_needs_none() -> None:
    x = torch.ones(2, 2, device="meta")
    with torch.autocast("cpu", torch.bfloat16), without_autocast(x):
        assert (x @ x).dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's autocast")
def test_it_is_the_autocast_of_the_tensors_device() -> None:
    x = torch.full((1, 1), 257.0, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), without_autocast(x):
        assert (x @ torch.ones_like(x)).item() == 257.0
