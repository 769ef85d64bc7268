"""The projections and heads of attentions with queries, keys and values.

x, y     [B, T, D]      B batch, T tokens, D model
memory   [B, S, D]      the input of cross-attention, S tokens
q        [B, H, T, C]   H query heads, C channels of a head
k, v     [B, G, S, C]   G key-value heads; query head h uses key-value head h // (H / G); S = T without a memory
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops import Shard, attention, linear
from ..checks import check_input, check_padding, check_sequence
from ..layout import WHOLE, Layout
from ..linear import Linear
from ..plain import is_plain_linear
from .inputs import Rotate


class PackedHeads(nn.Module):
    """The base of attentions with one packed projection for queries, keys and values, and an output projection.

    Args:
        hidden_dim: D, the width of the model.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads; None for as many as query heads.
        head_dim: channels of a head; None for hidden_dim / num_heads.
        bias: whether both projections have a bias.
        out_bias: whether the output projection has a bias; None for the same as `bias`.

    Raises:
        ValueError: heads that do not divide, or a number out of its range.
    """

    # The attributes that extra_repr shows besides the heads.
    shown: ClassVar[tuple[str, ...]] = ()
    layout: Layout = WHOLE

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
        self.qkv = Linear(hidden_dim, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.out = Linear(num_heads * head_dim, hidden_dim, bias=bias if out_bias is None else out_bias)

    def forward(self, x_BTD: Tensor, *, rotate: Rotate | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the attention of every token: [B, T, D] -> [B, T, D].

        Args:
            x_BTD: [B, T, D].
            rotate: adds positions to queries and keys, as `Position.rotate` does; None changes nothing.
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
        q_BHTC, k_BGTC, v_BGTC = (part.transpose(1, 2) for part in self.parts(x_BTD, "qkv"))
        return q_BHTC, k_BGTC, v_BGTC

    def parts(self, x_BTD: Tensor, names: str) -> list[Tensor]:
        """Return the queries, keys or values of every token: [B, T, D] -> [B, T, n, C] each.

        Args:
            x_BTD: the tokens.
            names: a part of "qkv", such as "q" or "kv".
        """
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        first = "qkv".index(names)
        own = heads[first : first + len(names)]
        begin = sum(heads[:first]) * self.head_dim
        rows = slice(begin, begin + sum(own) * self.head_dim)
        if names == "qkv":
            packed = self.qkv(x_BTD)
        elif is_plain_linear(self.qkv):
            bias = self.qkv.bias
            packed = linear(x_BTD, self.qkv.weight[rows], None if bias is None else bias[rows])
        else:
            # See Note: [guards of a split linear]. This path computes heads that are not used.
            packed = self.qkv(x_BTD)[..., rows]
        parts = torch.unflatten(packed, -1, (-1, self.head_dim))
        return [parts] if len(own) == 1 else list(parts.split(own, dim=-2))  # type: ignore[no-untyped-call]

    def attend(self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, *, p: float, **rules: Any) -> Tensor:
        """Return `ops.attention` of the heads that this process has, with dropout of probability p in training."""
        of_q = self.layout.shard(q_BHTC, 1)
        shard = None if of_q is None else Shard(of_q.start, (*of_q.shape[:3], k_BGSC.shape[2]))
        return attention(q_BHTC, k_BGSC, v_BGSC, p=p, training=self.training, shard=shard, **rules)

    def join(self, mixed_BHTC: Tensor) -> Tensor:
        """Join the heads and project them: [B, H, T, C] -> [B, T, D]."""
        y_BTD: Tensor = self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        return y_BTD

    def check_memory(self) -> None:
        """Raise ValueError if the options exclude a memory."""
        if getattr(self, "causal", False):
            raise ValueError("causal attention takes no memory; build it with causal=False")

    def check_look_at(
        self, memory: Tensor, x_BTD: Tensor, rotate: Rotate | None, key_padding_mask: Tensor | None
    ) -> None:
        """Raise ValueError unless x can look at this memory. Used by attentions with a memory."""
        self.check_memory()
        if rotate is not None:
            raise ValueError("rotate is for queries and keys of the same tokens; leave it out with a memory")
        wanted = (x_BTD.shape[0], self.hidden_dim)
        if memory.dim() != 3 or (memory.shape[0], memory.shape[2]) != wanted:
            raise ValueError(f"memory must be [{wanted[0]}, S, {wanted[1]}], got {list(memory.shape)}")
        if key_padding_mask is not None:
            check_padding(key_padding_mask, memory, called="the memory")

    def extra_repr(self) -> str:
        shown = ("num_heads", "num_kv_heads", "head_dim", *self.shown)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)


class CrossHeads(PackedHeads):
    """The base of attentions that can also look at a memory. Used by favor and nystrom."""

    def forward(
        self,
        x_BTD: Tensor,
        *,
        rotate: Rotate | None = None,
        key_padding_mask: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of every token: [B, T, D] -> [B, T, D].

        Args:
            x_BTD: [B, T, D].
            rotate: as for `PackedHeads.forward`; None if there is a memory.
            key_padding_mask: bool [B, S], True for a real token, False for padding, which is ignored.
            memory: [B, S, D], the source of keys and values in cross-attention; None for x itself.

        Raises:
            ValueError: an input has another shape or dtype, or inputs and options contradict each other.
        """
        if memory is None:
            return super().forward(x_BTD, rotate=rotate, key_padding_mask=key_padding_mask)
        check_sequence(x_BTD, self.hidden_dim)
        self.check_look_at(memory, x_BTD, rotate, key_padding_mask)
        parts = (*self.parts(x_BTD, "q"), *self.parts(memory, "kv"))
        q_BHTC, k_BGSC, v_BGSC = (part.transpose(1, 2) for part in parts)
        return self.join(self.mix_memory(q_BHTC, k_BGSC, v_BGSC, key_padding_mask))

    def mix_memory(self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """As `mix`, for a memory; the mask is for the memory's tokens, not for the queries."""
        return self.mix(q_BHTC, k_BGSC, v_BGSC, key_padding_mask)
