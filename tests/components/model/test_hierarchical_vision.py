import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers import build, rebuild
from fuselayers.components import HierarchicalVision
from fuselayers.configs import RebuildWarning
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise
from tests.components.model.small import made


def written_out(model: Any, images: Tensor) -> Tensor:
    """Calls the model's own patches and blocks."""
    x = images
    for patch, stage in zip(model.patch, model.stages, strict=True):
        assert (patch.patch_size - 1) // 2 == patch.padding
        side = patch.patches_along(x.shape[-1])
        y = dropout(patch(x) + stage.position.table.weight, model.dropout)
        for block in stage.blocks:
            y = block(y)
        y = F.layer_norm(y, y.shape[-1:], stage.norm.weight, stage.norm.bias)
        x = torch.stack([y[:, n] for n in range(y.shape[1])], -1).view(len(y), -1, side, side)
    return x.mean((2, 3)) @ model.head.weight.T + model.head.bias


@pytest.mark.parametrize(
    ("p", "sizes"),
    [(0.3, {}), (0.0, {"image_size": 8, "patch_sizes": (4, 1), "strides": (2, 1), "widths": (6, 6)})],
)
def test_values_and_gradients(sizes: dict[str, Any], p: float) -> None:
    model = randomise(made(HierarchicalVision, dropout=p, **sizes)).double()
    images = torch.randn(3, 3, model.image_size, model.image_size).double()
    assert_same_step(functools.partial(written_out, model), model, images, rtol=1e-8, atol=1e-8)


def test_the_shipped_config_trains() -> None:
    model = build("hierarchical_vision", ["model.image_size=8", "model.widths=[16,32,32]", "fusion=off"])
    assert [stage.context_length for stage in model.stages] == [16, 4, 1]
    images, targets = torch.randn(6, 3, 8, 8), torch.arange(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model(images, targets).item()
    assert before == pytest.approx(math.log(10))  # the head starts at zero
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(images, targets)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    assert model(images, targets).item() < 0.3 * before
    assert model(images).argmax(1).tolist() == targets.tolist()
    left = r"stages.0-2.blocks.0-1.attention: qkv.weight, .* left behind"
    with pytest.warns(RebuildWarning, match=left):
        rebuild(model, ["attention=pooling", "model.depths=[1,2,1]"])
