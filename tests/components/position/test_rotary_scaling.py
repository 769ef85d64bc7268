"""Rotary positions for sequences longer than in training, against those of transformers."""

import re

import pytest
import torch

from fuselayers.components import RotaryPosition

YARN = {"scaling": "yarn", "factor": 8.0, "original_length": 256}
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_length": 256}
# Options and the number of channels. Together the cases reach every branch of every scaling.
CASES = [
    ({"scaling": "linear", "factor": 4.0}, 16),
    ({"scaling": "ntk", "factor": 4.0}, 16),
    ({"scaling": "ntk", "factor": 2.5, "base": 500.0}, 4),
    (YARN, 64),
    ({**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "base": 500000.0}, 128),
    ({**YARN, "original_length": 16}, 8),  # no pair makes 32 turns
    ({**YARN, "factor": 0.5}, 64),
    (LLAMA3, 64),
    ({**LLAMA3, "factor": 32.0, "low_frequency_factor": 2.0, "high_frequency_factor": 3.0, "base": 500000.0}, 128),
    ({**LLAMA3, "factor": 0.5}, 64),
]


@pytest.mark.parametrize(("options", "channels"), CASES)
def test_it_is_transformers(options: dict[str, object], channels: int) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    position = RotaryPosition(**options)  # type: ignore[arg-type]
    theirs = {
        "rope_type": position.scaling,
        "rope_theta": position.base,
        "factor": position.factor,
        "original_max_position_embeddings": position.original_length,
        "beta_fast": position.beta_fast,
        "beta_slow": position.beta_slow,
        "low_freq_factor": position.low_frequency_factor,
        "high_freq_factor": position.high_frequency_factor,
    }
    if "attention_factor" in options:
        theirs["attention_factor"] = options["attention_factor"]
    length = None
    if position.scaling == "ntk":
        # transformers' scaling grows with the sequence: at `factor` times the original length it equals the static one.
        theirs |= {"rope_type": "dynamic", "factor": 1.0}
        length = int(256 * position.factor)
    config = transformers.LlamaConfig(
        hidden_size=channels, num_attention_heads=1, max_position_embeddings=256, rope_parameters=theirs
    )
    speed, attention_factor = rope.ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"), length)
    # A token turns by its place times the speed, and (1, 0) becomes (cos, sin).
    ones = torch.cat((torch.ones(channels // 2), torch.zeros(channels // 2))).view(1, 1, 1, channels)
    # An error in the slow, scaled pairs shows at large places, where float32 rounds the angles of the fast pairs.
    for place, tolerance in ((1, 1e-6), (300, 1e-4)):
        cos, sin = position.rotate(ones, ones, first=place)[0].flatten().chunk(2)
        angle = place * speed.double()
        torch.testing.assert_close(cos.double(), angle.cos() * attention_factor, rtol=1e-5, atol=tolerance)
        torch.testing.assert_close(sin.double(), angle.sin() * attention_factor, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"scaling": "lama3"},
            "no rotary scaling 'lama3'; did you mean 'llama3'? there are: linear, llama3, none, ntk, yarn",
        ),
        (
            {"scaling": "llama3", "factor": 8.0},
            "scaling 'llama3' needs original_length, the length of the sequences in training",
        ),
        ({**YARN, "beta_fast": 1.0}, "beta_fast must be above beta_slow, got 1.0 and 1.0"),
        ({**YARN, "base": 1.0}, "scaling 'yarn' needs a base above 1, got 1.0"),
        (
            {**LLAMA3, "high_frequency_factor": 1.0},
            "high_frequency_factor must be above low_frequency_factor, got 1.0 and 1.0",
        ),
    ],
)
def test_errors(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RotaryPosition(**options)  # type: ignore[arg-type]


def test_ntk_needs_a_pair_that_keeps_its_speed_and_one_that_does_not() -> None:
    position = RotaryPosition(scaling="ntk", factor=2.0)
    position.check_head_dim(4)
    with pytest.raises(ValueError, match=r"^scaling 'ntk' needs at least four channels per head, got 2$"):
        position.check_head_dim(2)
