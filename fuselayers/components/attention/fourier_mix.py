"""fourier_mix -- y = the real part of the Fourier transform of x along its tokens and its channels, as in FNet.

    x, y   [B, T, D]   B batch, T tokens, D model

    y[t, d] = sum_s sum_e x[s, e] cos(2 pi (t s / T + d e / D))

Lee-Thorp et al., "FNet: mixing tokens with Fourier transforms", 2021, section 3.
"""

import torch
from torch import Tensor, nn

from ..checks import check_input, zero_padding
from ..option import Size, checked
from ..registry import register


@register("attention", "fourier_mix")
class FourierMix(nn.Module):
    """Mixes all tokens with each other, without parameters. It cannot be causal.

    As in the paper, the sums are not normalised, so the output is about sqrt(T D) times as large as x. The next norm
    removes that factor. Padding becomes zeros but still counts as tokens: a longer row has other frequencies.

    Args:
        hidden_dim: D, the width of the model.

    Raises:
        ValueError: hidden_dim is below one.

    >>> FourierMix(1)(torch.tensor([[[1.0], [2.0]]])).flatten().tolist()
    [3.0, -1.0]
    """

    @checked
    def __init__(self, hidden_dim: Size) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim

    def forward(self, x_BTD: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the mixed tokens.

        Args:
            x_BTD: [B, T, D].
            key_padding_mask: bool [B, T], True for a real token, False for padding, which becomes zeros.

        Raises:
            ValueError: x or the mask has another shape, or the mask is not bool.
        """
        check_input(x_BTD, self.hidden_dim, key_padding_mask)
        # torch has no transform for bfloat16, and one for float16 only for some sizes on a GPU.
        wide_BTD = zero_padding(x_BTD, key_padding_mask).to(torch.promote_types(x_BTD.dtype, torch.float32))
        # torch's transform refuses an empty batch.
        y_BTD = torch.fft.fft2(wide_BTD).real if x_BTD.shape[0] else wide_BTD
        return y_BTD.to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"hidden_dim={self.hidden_dim}"
