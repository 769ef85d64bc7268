"""A vision transformer of timm, which the extra `timm` installs."""

import pytest
import torch
from torch import nn

from fuselayers.components.swap import unswap
from tests.components.compare import assert_same_values
from tests.components.swap.levels import both_levels, bytes_of, classes, gradients, swap_at

timm = pytest.importorskip("timm", exc_type=ImportError)

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **sizes, proj_drop_rate=0.1, drop_rate=0.1)


@both_levels
def test_it_is_found_verified_and_given_back(level: str) -> None:
    model = vit().eval()
    kinds, before = classes(model), bytes_of(model)
    wanted = gradients(model, {"x": IMAGES})
    report = swap_at(level, model, batch=IMAGES, verify=True)
    assert report.skipped == ()
    report.require("mlp" if level == "layers" else "block", at_least=2)
    # The dropout module of an attention is never called: torch's attention function drops.
    assert all(site.error is not None for site in report.sites if "attn" not in site.name)
    assert_same_values(wanted, gradients(model, {"x": IMAGES}))
    assert unswap(model) == len(report.sites)
    assert classes(model) == kinds
    assert bytes_of(model) == before
