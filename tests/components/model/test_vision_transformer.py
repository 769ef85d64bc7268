import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.components import Choice, VisionTransformer
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise
from tests.components.model.refused import assert_refused

SIZES = {
    "image_size": 12,
    "patch_size": 4,
    "num_classes": 5,
    "hidden_dim": 8,
    "num_layers": 2,
    "attention": Choice("multi_head", {"num_heads": 2}),
}


def made(**options: object) -> VisionTransformer:
    return VisionTransformer(**{**SIZES, "init": "bert", "init_std": 0.5, **options})  # type: ignore[arg-type]


class WrittenOut(nn.Module):
    """Calls the model's own patches and blocks."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        for name, module in model.named_children():
            self.add_module(name, module)
        self.class_token = model.class_token
        self.p = model.dropout

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images)
        if self.class_token is not None:
            x = torch.cat((self.class_token.repeat(len(x), 1, 1), x), dim=1)
        x = dropout(x + self.position.table.weight, self.p)
        for block in self.blocks:
            x = block(x)
        x = F.layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias)
        x = x[:, 0] if self.class_token is not None else sum(x.unbind(1)) / x.shape[1]
        return x @ self.head.weight.T + self.head.bias


@pytest.mark.parametrize(
    ("sizes", "pooling", "p"),
    [
        ({}, "class_token", 0.3),
        ({"image_size": 3, "patch_size": 1, "channels": 1}, "mean", 0.0),
        ({"image_size": 4}, "class_token", 0.0),
    ],
)
def test_values_and_gradients(sizes: dict[str, int], pooling: str, p: float) -> None:
    model = randomise(made(pooling=pooling, dropout=p, **sizes)).double()
    images = torch.randn(3, sizes.get("channels", 3), model.image_size, model.image_size).double()  # type: ignore[arg-type]
    assert_same_step(WrittenOut(model), model, images, rtol=1e-8, atol=1e-8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"image_size": 13}, "image_size must be a multiple of patch_size, got 13 and 4"),
        ({"pooling": "max"}, "no pooling 'max'; there are: class_token, mean"),
        (
            {"embedding": "token"},
            "embedding 'token' (fuselayers.components.embedding.TokenEmbedding) does not take the argument "
            "'patch_size'",
        ),
    ],
)
def test_errors_of_the_constructor(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made(**options)


@pytest.mark.parametrize(
    ("images", "targets", "error", "text"),
    [
        (
            torch.zeros(1, 3, 8, 12),
            None,
            ValueError,
            "images must be 12 x 12 pixels, got [1, 3, 8, 12]; resize them, or build the model with another image_size",
        ),
        ([[1.0]], torch.tensor([1]), TypeError, "images must be a tensor [B, 3, height, width], got list"),
        (
            torch.zeros(2, 3, 12, 12),
            [1, 2],
            TypeError,
            "targets must be a tensor like images, one class each, got list",
        ),
        (
            torch.zeros(2, 3, 12, 12),
            torch.tensor([1]),
            ValueError,
            "targets must be torch.int64 [2] like images, one class each, got torch.int64 [1]",
        ),
        (
            torch.zeros(2, 3, 12, 12),
            torch.tensor([1.0, 2.0]),
            ValueError,
            "targets must be torch.int64 [2] like images, one class each, got torch.float32 [2]",
        ),
        (
            torch.zeros(2, 3, 12, 12),
            torch.tensor([1, 5]),
            ValueError,
            "targets must be in 0..4 or -100, got 1..5",
        ),
    ],
)
def test_errors_of_a_call(images: object, targets: object, error: type[Exception], text: str) -> None:
    assert_refused(made(), error, text, images, targets)


def test_a_subclass_may_have_a_bias_of_its_own() -> None:
    class Calibrated(VisionTransformer):
        def __init__(self) -> None:
            super().__init__(**SIZES)  # type: ignore[arg-type]
            self.bias = nn.Parameter(torch.zeros(SIZES["num_classes"]))  # type: ignore[call-overload]

    model = Calibrated()
    images = torch.randn(2, 3, 12, 12)
    before = model(images)
    with torch.no_grad():
        model.bias += 1.0
    assert "bias" in model.state_dict()
    torch.testing.assert_close(model(images), before + 1.0)


def test_a_subclass_may_define_a_bias_in_its_class() -> None:
    class Fixed(VisionTransformer):
        bias = torch.ones(SIZES["num_classes"])  # type: ignore[call-overload]

    class Computed(VisionTransformer):
        @property
        def bias(self) -> Tensor:
            return torch.ones(5)

    images = torch.randn(2, 3, 12, 12)
    for kind in (Fixed, Computed):
        model = kind(**SIZES)  # type: ignore[arg-type]
        torch.testing.assert_close(model(images), model.head(model.features(images)) + 1.0)
