import cmath
import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import RotaryPosition


def as_complex(x: Tensor) -> Tensor:
    """[..., C] -> [..., C / 2]: channel i is the real part and channel i + C / 2 the imaginary part."""
    first, second = x.double().chunk(2, dim=-1)
    return torch.complex(first, second)


def turned(x: Tensor, base: float) -> Tensor:
    """The reference: each pair of channels is a complex number, multiplied by exp(i t base^(-2 j / C))."""
    tokens, channels = x.shape[-2:]
    turns = [[cmath.exp(1j * t * base ** (-2 * j / channels)) for j in range(channels // 2)] for t in range(tokens)]
    product = as_complex(x) * torch.tensor(turns, dtype=torch.complex128)
    return torch.cat((product.real, product.imag), dim=-1)


@pytest.mark.parametrize(
    ("tokens", "channels", "base", "interleaved", "fraction", "width"),
    [
        (7, 20, 10000.0, True, 1.0, 20),
        (7, 20, 10000.0, False, 0.5, 10),
        (7, 20, 10000.0, True, 0.33, 6),
        (7, 20, 10000.0, False, 0.33, 6),
        (1, 2, 500.0, False, 1.0, 2),
        (129, 2, 10000.0, False, 1.0, 2),
        (129, 64, 500.0, False, 1.0, 64),
    ],
)
def test_it_multiplies_complex_numbers(
    tokens: int, channels: int, base: float, interleaved: bool, fraction: float, width: int
) -> None:
    q, k = torch.randn(2, 4, tokens, channels), torch.randn(2, 2, tokens, channels)
    position = RotaryPosition(base=base, interleaved=interleaved, fraction=fraction)
    order = torch.arange(width)
    # In interleaved pairs, the first half of `order` holds the places of the real parts.
    order = torch.cat((order[0::2], order[1::2])) if interleaved else order
    for got, x in zip(position.rotate(q, k), (q, k), strict=True):
        assert torch.equal(got[..., width:], x[..., width:])
        expected = turned(x[..., order], base)
        torch.testing.assert_close(got[..., order].double(), expected, rtol=1e-5, atol=1e-4 if tokens > 7 else 1e-5)


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
def test_scalings_are_those_of_transformers(options: dict[str, object], channels: int) -> None:
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
            "no scaling 'lama3'; did you mean 'llama3'? there are: linear, llama3, none, ntk, yarn",
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
def test_errors_of_scalings(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RotaryPosition(**options)  # type: ignore[arg-type]


def test_errors_of_channels() -> None:
    q = torch.zeros(1, 1, 2, 3)
    with pytest.raises(
        ValueError, match=r"^position 'rotary' needs an even number of channels per head, at least two, got 3$"
    ):
        RotaryPosition().rotate(q, q)
    with pytest.raises(ValueError, match=r"at least two, got 0 \(0.1 of 8\)$"):
        RotaryPosition(fraction=0.1).check_head_dim(8)
    position = RotaryPosition(scaling="ntk", factor=2.0)
    position.check_head_dim(4)
    with pytest.raises(ValueError, match=r"^scaling 'ntk' needs at least four channels per head, got 2$"):
        position.check_head_dim(2)
