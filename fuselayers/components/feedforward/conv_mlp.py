"""conv_mlp -- y = down(dropout(activation(convolution(up(x))))): an MLP that also sees neighbouring tokens.

    x, y      [B, T, D]   B batch, T tokens, D model
    hidden    [B, T, F]   F = width, or int(expansion * D)
    weight    [F, 1, K]   K kernel_size, one filter for each hidden channel

    causal     conv[t] = sum over k of weight[k] * hidden[t - (K - 1) + k]
    else       conv[t] = sum over k of weight[k] * hidden[t - (K - 1) / 2 + k]

with zeros outside the sequence and for padding. It is the Mix-FFN of Xie et al., "SegFormer", 2021, section 3.1, over a
row of tokens in place of an image. The causal convolution is that of So et al., "Primer", 2021, section 4.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import dropout
from ..checks import check_input, check_odd, zero_padding
from ..layout import WHOLE, Layout
from ..linear import Linear
from ..option import Positive, Probability, Size, checked
from ..registry import register
from .hidden import activated, custom_activation, hidden_width


@register("feedforward", "conv_mlp")
class ConvMLP(nn.Module):
    """An MLP with a depthwise convolution over tokens before the activation.

    Args:
        hidden_dim: D, the width of the model.
        kernel_size: K, the number of tokens that the convolution sees; odd unless causal.
        expansion: the hidden width as a multiple of D.
        width: F, the hidden width, in place of an expansion; None takes int(expansion * D).
        activation: the name of any registered activation, or None for the identity.
        bias: whether both linear layers and the convolution have a bias.
        dropout: probability of dropping a hidden value in training, 0 <= dropout <= 1.
        causal: whether a token sees itself and the K - 1 tokens before it; else (K - 1) / 2 on either side.

    Raises:
        ValueError: a width or kernel_size below one, an even kernel_size that is not causal, an unknown activation, a
            dropout outside [0, 1], or (in forward) x of another shape.

    >>> import torch
    >>> layer = ConvMLP(8, kernel_size=2, causal=True)
    >>> x = torch.randn(1, 5, 8)
    >>> torch.allclose(layer(x)[:, :3], layer(x[:, :3]), atol=1e-6)
    True
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})
    mixes_tokens: ClassVar[bool] = True
    takes_padding: ClassVar[bool] = True
    layout: Layout = WHOLE

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        kernel_size: Size = 3,
        expansion: Positive = 4.0,
        width: Size | None = None,
        activation: str | None = "gelu",
        bias: bool = True,
        dropout: Probability = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if not causal:
            check_odd("kernel_size", kernel_size)
        width = hidden_width(hidden_dim, expansion=expansion, width=width)
        self.activation = activation
        self.dropout = dropout
        self.hidden_dim = hidden_dim
        self.causal = causal
        self.custom_activation = custom_activation(activation)
        self.up = Linear(hidden_dim, width, bias=bias)
        self.conv = nn.Conv1d(width, width, kernel_size, groups=width, bias=bias)
        self.down = Linear(width, hidden_dim, bias=bias)

    def forward(self, x_BTD: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D].

        Args:
            x_BTD: [B, T, D].
            key_padding_mask: bool [B, T], True for a real token, False for padding, which is ignored; None if all are
                real.

        Raises:
            ValueError: x or the mask has another shape, or the mask another dtype.
        """
        check_input(x_BTD, self.hidden_dim, key_padding_mask)
        (kernel_size,) = self.conv.kernel_size
        before = kernel_size - 1 if self.causal else kernel_size // 2
        # Padding becomes zeros after `up`, whose bias would change them.
        up_BTF = zero_padding(self.up(x_BTD), key_padding_mask)
        hidden_BFT = F.pad(up_BTF.transpose(1, 2), (before, kernel_size - 1 - before))
        hidden_BTF = activated(self.conv(hidden_BFT).transpose(1, 2), self.activation, self.custom_activation)
        shard = self.layout.shard(hidden_BTF, -1)
        y_BTD: Tensor = self.down(dropout(hidden_BTF, self.dropout, training=self.training, shard=shard))
        return y_BTD

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}, causal={self.causal}"
