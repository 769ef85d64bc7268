import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.components import VisionTransformer
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise
from tests.components.model.small import SIZES, made


def written_out(model: Any, images: Tensor) -> Tensor:
    """Calls the model's own patches and blocks."""
    x = model.patch(images)
    if model.class_token is not None:
        x = torch.cat((model.class_token.repeat(len(x), 1, 1), x), dim=1)
    x = dropout(x + model.position.table.weight, model.dropout)
    for block in model.blocks:
        x = block(x)
    x = F.layer_norm(x, x.shape[-1:], model.norm.weight, model.norm.bias)
    x = x[:, 0] if model.class_token is not None else sum(x.unbind(1)) / x.shape[1]
    return x @ model.head.weight.T + model.head.bias


@pytest.mark.parametrize(
    ("sizes", "pooling", "p"),
    [
        ({}, "class_token", 0.3),
        ({"image_size": 3, "patch_size": 1, "channels": 1}, "mean", 0.0),
        ({"image_size": 4}, "class_token", 0.0),
    ],
)
def test_values_and_gradients(sizes: dict[str, int], pooling: str, p: float) -> None:
    model = randomise(made(VisionTransformer, pooling=pooling, dropout=p, **sizes)).double()
    images = torch.randn(3, sizes.get("channels", 3), model.image_size, model.image_size).double()
    assert_same_step(functools.partial(written_out, model), model, images, rtol=1e-8, atol=1e-8)


def test_a_subclass_may_have_a_bias_of_its_own() -> None:
    class Calibrated(VisionTransformer):
        def __init__(self) -> None:
            super().__init__(**SIZES[VisionTransformer])
            self.bias = nn.Parameter(torch.zeros(5))

    model = Calibrated()
    images = torch.randn(2, 3, 12, 12)
    before = model(images)
    with torch.no_grad():
        model.bias += 1.0
    assert "bias" in model.state_dict()
    torch.testing.assert_close(model(images), before + 1.0)


def test_a_subclass_may_define_a_bias_in_its_class() -> None:
    class Fixed(VisionTransformer):
        bias = torch.ones(5)

    class Computed(VisionTransformer):
        @property
        def bias(self) -> Tensor:
            return torch.ones(5)

    images = torch.randn(2, 3, 12, 12)
    for kind in (Fixed, Computed):
        model = kind(**SIZES[VisionTransformer])
        torch.testing.assert_close(model(images), model.head(model.features(images)) + 1.0)
