"""linformer -- softmax attention to keys and values that are projected along the tokens, from length L to length P.

    x, y   [B, T, D]      B batch, T tokens, D model, T at most L
    q      [B, H, T, C]   H query heads, C channels of a head
    k, v   [B, G, T, C]   G key-value heads; query head h uses key-value head h // (H / G)
    e, f   [P, L]         the projections; the first T columns are used

    y = out(softmax(q (e k)^T / sqrt(C)) (f v))

Wang et al., "Linformer: self-attention with linear complexity", 2020, section 4.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_length, zero_padding
from ..linear import Linear
from ..option import Probability, Size, checked
from ..plain import is_plain_linear
from ..registry import register
from .packed_heads import PackedHeads


@register("attention", "linformer")
class LinformerAttention(PackedHeads):
    """Attention to a fixed number of mixtures of all tokens. It cannot be causal.

    All heads share the projections ("headwise sharing" in the paper). A sequence shorter than the context counts as if
    it were extended with zeros. Padding counts as zeros too.

    Args:
        context_length: L, the longest sequence in tokens.
        projected_length: P, the number of mixtures of tokens that keys and values are projected to.
        dropout: probability of dropping an attention probability in training, 0 <= dropout <= 1.

    Raises:
        ValueError: heads that do not divide, a size below one, or a dropout outside [0, 1]; in a call, a sequence that
            is longer than the context.

    >>> attention = LinformerAttention(8, num_heads=2, context_length=128, projected_length=16)
    >>> attention.key_projection.weight.shape
    torch.Size([16, 128])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"context_length"})
    shown: ClassVar[tuple[str, ...]] = ("dropout",)
    # The projections are [P, L]: they do not grow with the width of the model.
    without_width: ClassVar[frozenset[str]] = frozenset({"key_projection", "value_projection"})

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        context_length: Size,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        projected_length: Size = 256,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__(hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias)
        self.dropout = dropout
        self.context_length = context_length
        # These are modules, although `forward` may use only some columns of their weights, so that they are initialised
        # like other projections.
        self.key_projection = Linear(context_length, projected_length, bias=False)
        self.value_projection = Linear(context_length, projected_length, bias=False)

    def mix(self, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        check_length(q_BHTC.shape[-2], self.context_length, built="attention")
        k_BGPC = self._mixtures(self.key_projection, zero_padding(k_BGTC, key_padding_mask))
        v_BGPC = self._mixtures(self.value_projection, zero_padding(v_BGTC, key_padding_mask))
        return self.attend(q_BHTC, k_BGPC, v_BGPC, p=self.dropout)

    def _mixtures(self, projection: nn.Linear, x_BGTC: Tensor) -> Tensor:
        """Project along the tokens: [B, G, T, C] -> [B, G, P, C]."""
        tokens = x_BGTC.shape[2]
        if is_plain_linear(projection):
            y_BGPC: Tensor = projection.weight[:, :tokens] @ x_BGTC
            return y_BGPC
        # See Note: [guards of a split linear]. This path also multiplies the zeros up to the context length.
        y_BGCP: Tensor = projection(F.pad(x_BGTC, (0, 0, 0, self.context_length - tokens)).transpose(-2, -1))
        return y_BGCP.transpose(-2, -1)
