import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers import build, rebuild
from fuselayers.components import Choice, HierarchicalVision, LayerChange
from fuselayers.configs import RebuildWarning
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise

HEADS = Choice("multi_head", {"num_heads": 1, "num_kv_heads": 1})
SIZES: dict[str, Any] = {
    "image_size": 10,
    "num_classes": 5,
    "widths": (4, 8),
    "depths": (1, 2),
    "patch_sizes": (5, 2),
    "strides": (3, 2),
    "attention": HEADS,
}


def made(**options: Any) -> HierarchicalVision:
    return HierarchicalVision(**{**SIZES, "init": "bert", "init_std": 0.5, **options})


class WrittenOut(nn.Module):
    """Calls the model's own patches and blocks."""

    def __init__(self, model: HierarchicalVision) -> None:
        super().__init__()
        for name, module in model.named_children():
            self.add_module(name, module)
        self.p = model.dropout

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for patch, stage in zip(self.patch, self.stages, strict=True):  # type: ignore[arg-type]
            assert (patch.patch_size - 1) // 2 == patch.padding
            side = patch.patches_along(x.shape[-1])
            y = dropout(patch(x) + stage.position.table.weight, self.p)
            for block in stage.blocks:
                y = block(y)
            y = F.layer_norm(y, y.shape[-1:], stage.norm.weight, stage.norm.bias)
            x = torch.stack([y[:, n] for n in range(y.shape[1])], -1).view(len(y), -1, side, side)
        return x.mean((2, 3)) @ self.head.weight.T + self.head.bias


@pytest.mark.parametrize(
    ("p", "sizes"),
    [(0.3, {}), (0.0, {"image_size": 8, "patch_sizes": (4, 1), "strides": (2, 1), "widths": (6, 6)})],
)
def test_values_and_gradients(sizes: dict[str, Any], p: float) -> None:
    model = randomise(made(dropout=p, **sizes)).double()
    images = torch.randn(3, 3, model.image_size, model.image_size).double()  # type: ignore[arg-type]
    assert_same_step(WrittenOut(model), model, images, rtol=1e-8, atol=1e-8)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"depths": (1,)}, "depths must have one number for each stage, 2, got [1]"),
        ({"widths": ()}, "widths must have one number for each stage, at least one, got []"),
        ({"depths": (1, 0)}, "depths[1] must be at least 1, got 0"),
        (
            {"image_size": 2, "strides": (3, 1)},
            "stage 1: the sides of images must be at least 2 pixels, for one patch, got 1",
        ),
        (
            {"widths": (4, 6)},
            "heads must be as wide in every stage: the first has num_heads 1 at hidden_dim 4, which does not fit "
            "hidden_dim 6; make it a multiple of 4",
        ),
        ({"init": "mup"}, "init 'mup' is for models of one width; use another scheme"),
        ({"layers": (LayerChange("3", attention="pooling"),)}, "layers.at '3' names none of the 3 layers, 0 to 2"),
    ],
)
def test_errors_of_the_constructor(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made(**options)
