"""The contract of every component as a part of a model: copies, the meta device, one graph, 16 bits."""

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components import (
    Choice,
    Decoder,
    Encoder,
    HierarchicalVision,
    VisionTransformer,
    initialise,
    names,
    options,
)

HEADS = Choice("multi_head", {"num_heads": 4})
# These attentions cannot be causal, so an encoder holds them.
BOTH_WAYS = ("fourier_mix", "linformer", "nystrom")
TOKENS_BT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
IMAGE_SIZES: dict[str, Any] = {"image_size": 8, "num_classes": 5, "attention": HEADS, "init": "bert"}

Make = Callable[[], nn.Module]


def with_parts(**parts: Choice) -> Make:
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_dim": 32, "num_layers": 1, "context_length": 8}
    model = Encoder if "attention" in parts and parts["attention"].name in BOTH_WAYS else Decoder
    return lambda: model(**{**sizes, "attention": HEADS, "init_std": 0.3, **parts})


def choices(kind: str) -> list[Choice]:
    """Return each registered component of a kind, with its required options."""
    heads = [
        {"num_heads": 4} if "num_heads" in {option.name for option in options(kind, name)} else {}
        for name in names(kind)
    ]
    return [Choice(name, own) for name, own in zip(names(kind), heads, strict=True)]


def every_model() -> Iterator[Any]:
    """Yield a model for each registered component, and the models of images."""
    for kind in ("attention", "feedforward", "norm", "position", "residual", "block"):
        for choice in choices(kind):
            yield pytest.param(with_parts(**{kind: choice}), TOKENS_BT, id=f"{kind}-{choice.name}")
    convolved = Choice("nystrom", {"num_heads": 4, "conv_kernel_size": 3})
    yield pytest.param(with_parts(attention=convolved), TOKENS_BT, id="nystrom with a convolution")
    yield pytest.param(with_parts(residual=Choice("pre", {"layer_scale": 1e-2})), TOKENS_BT, id="layer_scale")
    yield pytest.param(with_parts(embedding=Choice("token", {"scale": True})), TOKENS_BT, id="scaled embedding")
    yield from image_models()


def image_models() -> Iterator[Any]:
    yield pytest.param(
        lambda: VisionTransformer(**IMAGE_SIZES, patch_size=4, hidden_dim=8, num_layers=1), IMAGES, id="vision"
    )
    stages: dict[str, Any] = {"widths": (8, 8), "depths": (1, 1), "patch_sizes": (3, 2), "strides": (2, 2)}
    yield pytest.param(lambda: HierarchicalVision(**IMAGE_SIZES, **stages), IMAGES, id="hierarchical_vision")


def every_graph() -> Iterator[Any]:
    """Yield models that hold every component. Several share a model, since compiling takes half a second."""
    for attention in choices("attention"):
        yield pytest.param(with_parts(attention=attention), TOKENS_BT, id=f"attention-{attention.name}")
    parts = {kind: choices(kind) for kind in ("position", "residual", "norm", "feedforward")}
    # Mixtures and reversible blocks have their own tests: the sizes of experts depend on data, and reversible blocks
    # run outside the graph.
    parts["feedforward"] = [choice for choice in parts["feedforward"] if choice.name != "mixture_of_experts"]
    for number in range(max(map(len, parts.values()))):
        row = {kind: several[number % len(several)] for kind, several in parts.items()}
        yield pytest.param(with_parts(**row), TOKENS_BT, id="-".join(choice.name for choice in row.values()))
    scaled = {"residual": Choice("pre", {"layer_scale": 1e-2}), "embedding": Choice("token", {"scale": True})}
    yield pytest.param(with_parts(**scaled), TOKENS_BT, id="scaled")
    yield from image_models()


# Each component occurs once: the other components of a model do not affect a copy.
every_model_and_its_input = pytest.mark.parametrize(("make", "x"), [*every_model()])


@every_model_and_its_input
def test_copies_and_pickles_compute_the_same(make: Make, x: torch.Tensor) -> None:
    model = make().eval()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
        assert {id(value) for value in other.parameters()}.isdisjoint(map(id, model.parameters()))


@pytest.mark.parametrize(("make", "x"), [*every_graph()])
def test_one_graph_computes_the_same(make: Make, x: torch.Tensor) -> None:
    model = make().eval()
    torch.compiler.reset()  # Dynamo counts the graphs of the forward that all models share
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@every_model_and_its_input
def test_a_model_from_the_meta_device_is_initialised_whole_and_loads_a_state(make: Make, x: torch.Tensor) -> None:
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.fill_(math.nan if tensor.is_floating_point() else 99)
    initialise(model, "gpt2", num_layers=1)
    assert not [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.isnan().any()]
    assert model(x).isfinite().all()
    made = make()
    model.load_state_dict(made.state_dict())
    torch.testing.assert_close(model.eval()(x), made.eval()(x))


@every_model_and_its_input
def test_in_16_bits_it_is_near_and_keeps_the_dtype(make: Make, x: torch.Tensor) -> None:
    model = make().eval()
    expected = model(x)
    narrow = copy.deepcopy(model).bfloat16()(x.bfloat16() if x.is_floating_point() else x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(x)
    for got in (narrow, cast):
        assert got.dtype == torch.bfloat16
        assert (got.float() - expected).abs().max() <= 0.1 * expected.abs().max() + 0.02
