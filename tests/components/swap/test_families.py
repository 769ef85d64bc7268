"""The model families of transformers. `make test-versions` runs these tests with the oldest and the newest version."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from fuselayers.components.swap import swap, unswap
from fuselayers.partition import saved_bytes
from tests.components.compare import assert_same_values
from tests.components.swap.layers import without_dropout
from tests.components.swap.levels import gradients
from tests.components.swap.models import FAMILIES, batch_for, loss_of

transformers = pytest.importorskip("transformers")

QUICK = ("gpt2", "llama")


# Every family runs every day and with every supported transformers: no other test shows that a rule stops matching.
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:swap found nothing")
def test_rules(name: str) -> None:
    make, rules = FAMILIES[name]
    assert Counter(site.rule for site in swap(make(), level="layers", verify=False).sites) == rules


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.filterwarnings("ignore:swap found nothing")
def test_losses_and_gradients(name: str) -> None:
    model, batch = FAMILIES[name][0]().eval(), batch_for(name)
    wanted = gradients(model, batch)
    report = swap(model, level="layers", batch=batch)
    assert report.skipped == () or report.sites == ()
    # Some dropouts are never called, and torch computes attention that drops nothing.
    compared = [site for site in report.sites if site.kind != "Dropout" and site.rule != "attention_dropout"]
    assert all(site.error is not None for site in compared)
    assert_same_values(wanted, gradients(model, batch))
    assert unswap(model) == len(report.sites)


def share(name: str, level: str) -> float:
    """Return the bytes that a training step of a swapped model saves, as a share of the plain model's."""
    model, batch = FAMILIES[name][0]().train(), batch_for(name)
    before = saved_bytes(model, **batch)
    swap(model, level=level, verify=False)  # type: ignore[arg-type]
    return saved_bytes(model, **batch) / before


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("gpt2", 0.40), ("bert", 0.70), ("llama", 0.70), ("mistral", 0.70), ("qwen3", 0.67), ("gemma2", 0.71)),
        *(("phi", 0.62), ("stablelm", 0.81), ("vit", 0.77), ("t5", 0.44), ("phi3", 0.77)),
    ],
)
def test_layers_save_fewer_bytes(name: str, most: float) -> None:
    assert share(name, "layers") <= most


@pytest.mark.slow  # Inductor compiles each model
@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("gpt2", 0.40), ("bert", 0.55), ("llama", 0.60), ("mistral", 0.60), ("qwen3", 0.60), ("gemma2", 0.65)),
        *(("opt", 0.75), ("phi", 0.60), ("stablelm", 0.65), ("vit", 0.70), ("deit", 0.70), ("t5", 0.50)),
    ],
)
def test_blocks_save_fewer_bytes(name: str, most: float) -> None:
    assert share(name, "blocks") <= most


# The slow cases trace blocks of several kinds. Every kind of input occurs (pixels, sound, two texts).
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "deit", "swin", "whisper", "t5", "wav2vec2")),
    ],
)
def test_a_batch_is_made_from_the_config(name: str) -> None:
    model = FAMILIES[name][0]()
    report = swap(model, level="blocks", backend="eager")
    assert not any(note.startswith("not verified") for note in report.notes)
    assert report.skipped == ()
    assert any(site.error is not None for site in report.sites)
    assert report.saved_after is not None
    batch = batch_for(name)
    assert torch.isfinite(loss_of(without_dropout(model).train(), batch))


_SIZES: Final = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_IMAGES: Final = {**_SIZES, "image_size": 16, "patch_size": 8}
_CONFIGS: Final[dict[str, Callable[[], Any]]] = {
    "CLIPModel": lambda: transformers.CLIPConfig(
        text_config={**_SIZES, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=_IMAGES,
        projection_dim=8,
    ),
    "ASTModel": lambda: transformers.ASTConfig(
        **_SIZES, max_length=32, num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8
    ),
    "VisionEncoderDecoderModel": lambda: transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**_IMAGES),
        transformers.BertConfig(**_SIZES, vocab_size=99, is_decoder=True, add_cross_attention=True),
    ),
}


@pytest.mark.parametrize("name", _CONFIGS)
def test_a_batch_is_made_of_two_inputs_and_for_parts_of_a_config(name: str) -> None:
    report = swap(getattr(transformers, name)(_CONFIGS[name]()), level="layers")
    assert any(site.error is not None for site in report.sites)
    assert report.saved_after is not None


# The blocks of Swin have several widths. The eager backend's blocks save more than layers.
@pytest.mark.parametrize(("name", "backend"), [("swin", "auto"), ("llama", "eager")])
def test_the_default_takes_layers_where_blocks_take_long_or_save_more(name: str, backend: str) -> None:
    report = swap(FAMILIES[name][0](), backend=backend)
    assert report.level == "layers"
    assert all(site.error is not None for site in report.sites)
