"""rotary -- queries and keys turned by an angle that grows with their position, as in Llama.

    q             [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head
    k             [B, G, T, C]   G key heads
    speed[i]      base^(-2 i / W), for i in 0 .. W/2 - 1, where W = fraction * C channels are turned
    angle[t, i]   t * speed[i]

For sequences longer than in training, up to `factor` times, the scalings turn more slowly:

    linear   speed / factor: all positions are squeezed into the known range
    ntk      base * factor^(W / (W - 2)) as base: the fastest pair keeps its speed, the slowest is divided by factor
    yarn     speed * share: 1 for pairs up to the one that makes beta_fast turns in original_length tokens, 1 / factor
             from the one that makes beta_slow, linear in i between; cos and sin times attention_factor
    llama3   speed * share: 1 for pairs that make high_frequency_factor turns or more in original_length tokens,
             1 / factor for low_frequency_factor or fewer, linear in the number of turns between

Su et al., "RoFormer", 2021, section 3.2.2. linear: Chen et al. 2023, section 2.3; ntk: bloc97, "NTK-aware scaled RoPE",
2023; yarn: Peng et al., "YaRN", 2023, sections 3.2 to 3.4; llama3: the released code of Llama 3.1.
"""

import math
from typing import Final, Literal

import torch
from torch import Tensor

from ...ops import rotary
from ..option import Positive, Share, Size, checked
from ..registry import register
from .position import Position

RotaryScaling = Literal["none", "linear", "ntk", "yarn", "llama3"]

# The options that a scaling reads besides factor.
_OPTIONS: Final = {
    "yarn": ("original_length", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("original_length", "low_frequency_factor", "high_frequency_factor"),
}


@register("position", "rotary")
class RotaryPosition(Position):
    """Rotates queries and keys; works for any length and any even number of channels per head.

    Args:
        base: the slowest pair of channels turns about `base` times slower than the fastest.
        interleaved: whether neighbours (2 i, 2 i + 1) form a pair, as in GPT-J, instead of (i, i + W/2), as in Llama.
        fraction: share of a head's channels that is rotated, 0 < fraction <= 1; 0.25 in GPT-NeoX.
        scaling: the method for sequences longer than in training; the options below are only for a scaling.
        factor: how many times longer the sequences are than in training.
        original_length: length in tokens of the sequences in training; yarn and llama3 need it.
        beta_fast: yarn's number of turns within original_length from which a pair keeps its speed.
        beta_slow: yarn's number of turns up to which a pair is slowed down in full.
        attention_factor: yarn's factor of queries and keys, the square root of its 1 / temperature; None for
            0.1 ln(factor) + 1, or 1 if factor is below 1.
        low_frequency_factor: llama3's number of turns up to which a pair is slowed down in full.
        high_frequency_factor: llama3's number of turns from which a pair keeps its speed.

    Raises:
        ValueError: a number out of its range; an unknown scaling, or missing or unsuitable options of a scaling; in
            `check_head_dim` and `rotate`, the number of rotated channels is odd, zero, or with ntk two.

    >>> q = torch.tensor([1.0, 0.0]).repeat(1, 1, 2, 1)
    >>> RotaryPosition().rotate(q, q)[0][0, 0]
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    @checked
    def __init__(
        self,
        *,
        base: Positive = 10000.0,
        interleaved: bool = False,
        fraction: Share = 1.0,
        scaling: RotaryScaling = "none",
        factor: Positive = 1.0,
        original_length: Size | None = None,
        beta_fast: Positive = 32.0,
        beta_slow: Positive = 1.0,
        attention_factor: Positive | None = None,
        low_frequency_factor: Positive = 1.0,
        high_frequency_factor: Positive = 4.0,
    ) -> None:
        super().__init__()
        if "original_length" in _OPTIONS.get(scaling, ()) and original_length is None:
            raise ValueError(f"scaling {scaling!r} needs original_length, the length of the sequences in training")
        if scaling == "yarn" and beta_fast <= beta_slow:
            raise ValueError(f"beta_fast must be above beta_slow, got {beta_fast} and {beta_slow}")
        if scaling == "yarn" and base <= 1:
            raise ValueError(f"scaling 'yarn' needs a base above 1, got {base}")
        if scaling == "llama3" and high_frequency_factor <= low_frequency_factor:
            raise ValueError(
                "high_frequency_factor must be above low_frequency_factor, "
                f"got {high_frequency_factor} and {low_frequency_factor}"
            )
        if attention_factor is None:
            attention_factor = 0.1 * math.log(max(factor, 1.0)) + 1
        self.base = base
        self.interleaved = interleaved
        self.fraction = fraction
        self.scaling: RotaryScaling = scaling
        self.factor = factor
        self.original_length = original_length
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.attention_factor = attention_factor
        self.low_frequency_factor = low_frequency_factor
        self.high_frequency_factor = high_frequency_factor

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless the rotated share of `head_dim` channels can be split into pairs."""
        turned = self._turned(head_dim)
        share = "" if self.fraction == 1 else f" ({self.fraction} of {head_dim})"
        if turned < 2 or turned % 2:
            raise ValueError(
                f"position 'rotary' needs an even number of channels per head, at least two, got {turned}{share}"
            )
        if self.scaling == "ntk" and turned == 2:
            raise ValueError(f"scaling 'ntk' needs at least four channels per head, got {turned}{share}")

    def _turned(self, channels: int) -> int:
        # Rounded down, as GPT-NeoX and Phi do.
        return channels if self.fraction == 1 else int(channels * self.fraction)

    def rotate(self, q_BHTC: Tensor, k_BGTC: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """[B, H, T, C], [B, G, T, C] -> the same shapes and dtypes, rotated."""
        # Note: [no stored table] T x W/2 angles cost little compared with q and k. A buffer would have to be filled
        # again after a model is built on the meta device, and would limit the length.
        tokens, channels = q_BHTC.shape[-2:]
        self.check_head_dim(channels)
        position = torch.arange(first, first + tokens, device=q_BHTC.device, dtype=torch.float32)
        angle = position[:, None] * self._speed(self._turned(channels), q_BHTC.device)
        cos, sin = angle.cos(), angle.sin()
        if self.scaling == "yarn":
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return rotary(q_BHTC, k_BGTC, cos, sin, interleaved=self.interleaved)

    def _speed(self, turned: int, device: torch.device) -> Tensor:
        """Return the angle between neighbouring tokens for each pair: float32 [W / 2]."""
        pair = torch.arange(turned // 2, device=device, dtype=torch.float32)
        base = self.base
        if self.scaling == "ntk":
            base *= self.factor ** (turned / (turned - 2))
        speed: Tensor = base ** (pair * (-2 / turned))
        if self.scaling == "linear":
            return speed / self.factor
        if self.scaling == "yarn":
            kept_up_to, slowed_from = self._yarn_pairs(turned)
            return speed * self._share(pair, slowed_at=slowed_from, kept_at=kept_up_to)
        if self.scaling == "llama3":
            assert self.original_length is not None
            turn = 2 * math.pi / self.original_length
            slowed_at, kept_at = self.low_frequency_factor * turn, self.high_frequency_factor * turn
            return speed * self._share(speed, slowed_at=slowed_at, kept_at=kept_at)
        return speed

    def _share(self, x: Tensor, *, slowed_at: float, kept_at: float) -> Tensor:
        """Interpolate linearly in x from 1 / factor at `slowed_at` to 1 at `kept_at`, constant beyond both."""
        slowed = 1 / self.factor
        slope = (1 - slowed) / (kept_at - slowed_at)
        return (x * slope + (1 - slope * kept_at)).clamp(min(slowed, 1.0), max(slowed, 1.0))

    def _yarn_pairs(self, turned: int) -> tuple[float, float]:
        """Return the last pair that keeps its speed, and the first that is slowed down in full."""
        assert self.original_length is not None

        def pair_with(turns: float, original_length: int = self.original_length) -> float:
            return turned * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        # Rounded and bounded as in the authors' code, including the upper bound, which no pair reaches.
        kept_up_to = max(math.floor(pair_with(self.beta_fast)), 0)
        slowed_from = min(math.ceil(pair_with(self.beta_slow)), turned - 1)
        return kept_up_to, max(slowed_from, kept_up_to + 0.001)

    def extra_repr(self) -> str:
        said = ["base", "interleaved", "fraction"]
        if self.scaling != "none":
            said += ["scaling", "factor", *_OPTIONS.get(self.scaling, ())]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)
