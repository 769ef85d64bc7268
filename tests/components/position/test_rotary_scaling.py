"""Rotary positions for sequences longer than in training, against the papers' formulas and Hugging Face's."""

import math
import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import RotaryPosition
from tests.components.compare import run

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


def speeds(position: RotaryPosition, channels: int) -> list[float]:
    """The papers' formulas, pair by pair, in Python's floats."""
    return [scaled_speed(position, pair, channels) for pair in range(channels // 2)]


def scaled_speed(position: RotaryPosition, pair: int, channels: int) -> float:
    base, factor, length = position.base, position.factor, position.original_length
    speed = base ** (-2 * pair / channels)
    if position.scaling == "linear":
        return speed / factor
    if position.scaling == "ntk":
        return (base * factor ** (channels / (channels - 2))) ** (-2 * pair / channels)
    turns = length * speed / (2 * math.pi)
    if position.scaling == "llama3":
        low, high = position.low_frequency_factor, position.high_frequency_factor
        if turns <= low:
            return speed / factor
        if turns >= high:
            return speed
        smooth = (turns - low) / (high - low)
        return (1 - smooth) * speed / factor + smooth * speed
    # YaRN: the pair that makes `beta` turns, solved from turns = length * base^(-2 pair / channels) / (2 pi).
    first, last = (
        channels * math.log(length / (2 * math.pi * beta)) / (2 * math.log(base))
        for beta in (position.beta_fast, position.beta_slow)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), channels - 1)
    ramp = min(max((pair - first) / (last - first), 0.0), 1.0)
    return (1 - ramp) * speed + ramp * speed / factor


def reference(position: RotaryPosition, x: Tensor, first: int) -> Tensor:
    """Each pair of channels as a complex number, turned by exp(i t speed)."""
    tokens, channels = x.shape[-2:]
    place = torch.arange(first, first + tokens, dtype=torch.float64)
    angle = place[:, None] * torch.tensor(speeds(position, channels), dtype=torch.float64)
    length = position.attention_factor if position.scaling == "yarn" else 1.0
    real, imaginary = x.double().chunk(2, dim=-1)
    product = torch.complex(real, imaginary) * torch.polar(torch.full_like(angle, length), angle)
    return torch.cat((product.real, product.imag), dim=-1)


# An error in the fastest pairs shows at small places, an error in the slow, scaled pairs at large places.
@pytest.mark.parametrize("first", [0, 300])
@pytest.mark.parametrize(("options", "channels"), CASES)
def test_it_is_the_formula_with_its_gradient(options: dict[str, object], channels: int, first: int) -> None:
    position = RotaryPosition(**options)  # type: ignore[arg-type]
    q, k = torch.randn(2, 4, 7, channels).double(), torch.randn(2, 2, 7, channels).double()
    got = run(lambda q, k: position.rotate(q, k, first=first), [q, k])
    expected = run(lambda q, k: (reference(position, q, first), reference(position, k, first)), [q, k])
    for name, value in expected.items():
        # The angles are float32: at place 306 the fastest pair's is off by 2e-5.
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


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
    # One token at place 1 turns by its speed, and (1, 0) becomes (cos, sin).
    ones = torch.cat((torch.ones(channels // 2), torch.zeros(channels // 2))).view(1, 1, 1, channels)
    cos, sin = position.rotate(ones, ones, first=1)[0].flatten().chunk(2)
    torch.testing.assert_close(cos, speed.cos() * attention_factor, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sin, speed.sin() * attention_factor, rtol=1e-5, atol=1e-6)


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
    with pytest.raises(ValueError, match=r"^scaling 'ntk' needs four channels per head at least, got 2$"):
        position.check_head_dim(2)
