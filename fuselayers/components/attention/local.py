"""local -- softmax attention of every token to those less than `window` tokens away.

    x, y   [B, T, D]       B batch, T tokens, D model
    q      [B, H, T, C]    H query heads, C channels of a head
    k, v   [B, G, T, C]    G key-value heads; query head h uses key-value head h // (H / G)

    y[t] = out(softmax(q[t] k^T / sqrt(C), over s with |t - s| < window, s <= t if causal) v)

Kernels skip the blocks of keys that a window hides. Where none runs, all pairs are computed (see `ops.attention`).

Beltagy et al., "Longformer", 2020, section 3.1; causal: Jiang et al., "Mistral 7B", 2023, section 2.
"""

from typing import Any, ClassVar

from torch import Tensor

from ..option import Probability, Size, checked
from ..registry import register
from .inputs import Rotate
from .packed_heads import PackedHeads


@register("attention", "local")
class LocalAttention(PackedHeads):
    """Attention to neighbours. Its time grows with the number of tokens times the window.

    The arguments and errors of `PackedHeads`, and:

    Args:
        window: the range of attention in tokens. A token looks at itself and the tokens less than `window` away, on
            both sides, or only before it if causal.
        dropout: probability of dropping an attention probability in training, 0 <= dropout <= 1.
        causal: whether a token looks only at itself and the tokens before it.

    >>> LocalAttention(8, num_heads=2, window=3).window
    3
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})
    shown: ClassVar[tuple[str, ...]] = ("window", "dropout", "causal")

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        window: Size = 128,
        dropout: Probability = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__(hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias)
        self.window = window
        self.dropout = dropout
        self.causal = causal

    def forward(
        self,
        x_BTD: Tensor,
        *,
        rotate: Rotate | None = None,
        key_padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of every token: [B, T, D] -> [B, T, D].

        Args:
            x_BTD: [B, T, D].
            rotate: as for `PackedHeads.forward`.
            key_padding_mask: as for `PackedHeads.forward`.
            documents: integers [B, T], the number of each token's document, if a row holds several: a token looks only
                at its own document. None if each row is one document.

        Raises:
            ValueError: an input has another shape or dtype.
        """
        q_BHTC, k_BGTC, v_BGTC = self.project(x_BTD, key_padding_mask)
        if rotate is not None:
            q_BHTC, k_BGTC = rotate(q_BHTC, k_BGTC)
        rules: dict[str, Any] = {"window": self.window, "key_padding_mask": key_padding_mask, "documents": documents}
        return self.join(self.attend(q_BHTC, k_BGTC, v_BGTC, p=self.dropout, causal=self.causal, **rules))
