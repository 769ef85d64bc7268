import pytest
import torch
from torch import nn

from fuselayers.cli.example import example_batch
from fuselayers.configs import build, compose


def sizes_of(name: str, sizes: tuple[int, ...]) -> list[list[int]]:
    config = compose(name, ["fusion=off"])
    with torch.device("meta"):
        model = build(config)
    return [list(tensor.shape) for tensor in example_batch(model, config, sizes, device="meta")]


def test_a_batch_is_as_large_as_asked_for() -> None:
    assert sizes_of("vit_tiny", (2,)) == [[2, 3, 12, 12], [2]]
    assert sizes_of("t5_tiny", (2,)) == [[2, 64], [2, 64]]
    assert sizes_of("t5_tiny", (2, 7)) == [[2, 7], [2, 7]]


def test_errors() -> None:
    said = "model 'vision_transformer' has no context length; --batch must be a number of examples, as 4, got 2x7"
    with pytest.raises(ValueError, match=f"^{said}$"):
        sizes_of("vit_tiny", (2, 7))
    with pytest.raises(
        ValueError, match=r"^model 'decoder' does not say what it is called with; give Linear a method "
    ):
        example_batch(nn.Linear(1, 1), compose("gpt_nano"), (1,), device="meta")
