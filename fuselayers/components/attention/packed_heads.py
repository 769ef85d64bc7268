"""The projections and heads of attentions with queries, keys and values.

x, y    [B, T, D]      B batch, T tokens, D model
q       [B, H, T, C]   H query heads, C channels of a head
k, v    [B, G, T, C]   G key-value heads; query head h uses key-value head h // (H / G)
"""

from typing import ClassVar

from torch import Tensor, nn

from ..checks import check_input
from .inputs import Rotate


class PackedHeads(nn.Module):
    """The base of attentions with one packed projection for queries, keys and values, and an output projection.

    Args:
        hidden_dim: D, the width of the model.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads; None for as many as query heads.
        head_dim: channels of a head; None for hidden_dim / num_heads.
        bias: whether both projections have a bias.
        out_bias: whether the second one has one; None for the same as `bias`.

    Raises:
        ValueError: heads that do not divide, or a number out of its range.
    """

    # What extra_repr shows beside the heads.
    shown: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        hidden_dim: int,
        *,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        bias: bool,
        out_bias: bool | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if head_dim is None:
            if hidden_dim % num_heads:
                raise ValueError(
                    f"hidden_dim must be a multiple of num_heads, got {hidden_dim} and {num_heads}; or give head_dim"
                )
            head_dim = hidden_dim // num_heads
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.qkv = nn.Linear(hidden_dim, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.out = nn.Linear(num_heads * head_dim, hidden_dim, bias=bias if out_bias is None else out_bias)

    def forward(self, x_BTD: Tensor, *, rotate: Rotate | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the attention of every token: [B, T, D] -> [B, T, D].

        Args:
            x_BTD: [B, T, D].
            rotate: puts positions into queries and keys, as `Position.rotate` does; None leaves them.
            key_padding_mask: bool [B, T], True for a real token, False for padding, which is ignored. A token
                without any allowed key gets zeros before the output projection.

        Raises:
            ValueError: x or the mask has another shape, or the mask is not bool.
        """
        q_BHTC, k_BGTC, v_BGTC = self.project(x_BTD, key_padding_mask)
        if rotate is not None:
            q_BHTC, k_BGTC = rotate(q_BHTC, k_BGTC)
        return self.join(self.mix(q_BHTC, k_BGTC, v_BGTC, key_padding_mask))

    def mix(self, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return the result of every head, [B, H, T, C]; for subclasses that do not override `forward`."""
        raise NotImplementedError

    def project(self, x_BTD: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Check x and the mask; return queries, keys and values of every token: [B, H, T, C], [B, G, T, C] twice."""
        check_input(x_BTD, self.hidden_dim, key_padding_mask)
        q_BHTC, k_BGTC, v_BGTC = (part.transpose(1, 2) for part in self.split(x_BTD))
        return q_BHTC, k_BGTC, v_BGTC

    def split(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values from the projection: [B, T, H, C], [B, T, G, C] twice."""
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q_BTHC, k_BTGC, v_BTGC = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_BTD).split(sizes, dim=-1)
        )
        return q_BTHC, k_BTGC, v_BTGC

    def join(self, mixed_BHTC: Tensor) -> Tensor:
        """Join the heads and project them: [B, H, T, C] -> [B, T, D]."""
        y_BTD: Tensor = self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        return y_BTD

    def extra_repr(self) -> str:
        shown = ("num_heads", "num_kv_heads", "head_dim", *self.shown)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
