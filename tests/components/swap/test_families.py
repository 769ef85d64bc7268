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
from tests.components.swap.models import FAMILIES, IMAGES, TEXTS, batch_for, loss_of

transformers = pytest.importorskip("transformers")

QUICK = ("gpt2", "llama")


# Every family runs every day and with every supported transformers: no other test shows that a rule stops matching.
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:swap changed nothing")
def test_rules(name: str) -> None:
    make, rules = FAMILIES[name]
    assert Counter(site.rule for site in swap(make(), level="layers", verify=False).sites) == rules


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.filterwarnings("ignore:swap changed nothing")
def test_losses_and_gradients(name: str) -> None:
    model, batch = FAMILIES[name][0]().eval(), batch_for(name)
    wanted = gradients(model, batch)
    report = swap(model, level="layers", batch=batch)
    assert report.skipped == () or report.sites == ()
    compared = [site for site in report.sites if site.kind != "Dropout"]  # some are never called
    assert all(site.error is not None for site in compared)
    assert_same_values(wanted, gradients(model, batch))
    assert unswap(model) == len(report.sites)


# The largest share of the plain model's bytes that a training step may save.
LAYERS: Final = {
    **{"gpt2": 0.40, "bert": 0.70, "llama": 0.70, "mistral": 0.70, "qwen3": 0.67, "gemma2": 0.71, "phi": 0.62},
    **{"stablelm": 0.81, "vit": 0.77, "t5": 0.44, "phi3": 0.77},
}
BLOCKS: Final = {
    **{"gpt2": 0.40, "bert": 0.55, "llama": 0.60, "mistral": 0.60, "qwen3": 0.60, "gemma2": 0.65, "opt": 0.75},
    **{"phi": 0.60, "stablelm": 0.65, "vit": 0.70, "deit": 0.70, "t5": 0.50},
}


# Inductor compiles each model at level blocks.
@pytest.mark.parametrize(
    ("level", "name", "most"),
    [
        *(("layers", *item) for item in LAYERS.items()),
        *(pytest.param("blocks", *item, marks=pytest.mark.slow) for item in BLOCKS.items()),
    ],
)
def test_a_step_saves_fewer_bytes(level: Any, name: str, most: float) -> None:
    model, batch = FAMILIES[name][0]().train(), batch_for(name)
    before = saved_bytes(model, **batch)
    swap(model, level=level, verify=False)
    assert saved_bytes(model, **batch) <= most * before


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


_CONFIGS: Final[dict[str, Callable[[], Any]]] = {
    "CLIPModel": lambda: transformers.CLIPConfig(
        text_config=TEXTS,
        vision_config=IMAGES,
        projection_dim=8,
    ),
    "ASTModel": lambda: transformers.ASTConfig(
        **TEXTS, max_length=32, num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8
    ),
    "VisionEncoderDecoderModel": lambda: transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**IMAGES),
        transformers.BertConfig(**TEXTS, is_decoder=True, add_cross_attention=True),
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


def test_a_model_that_reads_its_cache_as_a_mask_keeps_it() -> None:
    """FSMT hides later tokens only without a cache, which is not its default."""
    sides = {
        f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    sizes = {"src_vocab_size": 99, "tgt_vocab_size": 99, "d_model": 8, "dropout": 0.0, "attention_dropout": 0.0}
    model = transformers.FSMTModel(transformers.FSMTConfig(**sizes, **sides)).train()
    batch = {name: torch.arange(3, 15).view(2, 6) for name in ("input_ids", "decoder_input_ids")}
    wanted = model(**batch).last_hidden_state
    assert swap(model, level="layers", batch=batch).sites
    torch.testing.assert_close(model(**batch).last_hidden_state, wanted)
