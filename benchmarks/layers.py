"""Layers in plain PyTorch, without this library. `benchmarks.partition` cuts their graphs.

B batch, T tokens, D hidden, H heads, C channels of a head, V vocabulary
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TransformerLayer(nn.Module):
    """GPT's layer, and BERT's: causal attention and a gelu MLP, dropout on both branches.

    Args:
        hidden_dim: D.
        num_heads: H, a divisor of D.
        dropout: the probability in both branches, and in written-out attention.
        post_norm: True normalises the sums, as BERT does; False normalises the inputs of the branches, as GPT does.
        written_out: True computes attention as matmul, softmax, dropout, matmul; False calls PyTorch's fused attention.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.1,
        post_norm: bool = False,
        written_out: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.post_norm, self.written_out = num_heads, dropout, post_norm, written_out
        self.norm1, self.norm2 = nn.LayerNorm(hidden_dim), nn.LayerNorm(hidden_dim)
        self.qkv, self.out = nn.Linear(hidden_dim, 3 * hidden_dim), nn.Linear(hidden_dim, hidden_dim)
        self.up, self.down = nn.Linear(hidden_dim, 4 * hidden_dim), nn.Linear(4 * hidden_dim, hidden_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.post_norm:
            x_BTD = self.norm1(x_BTD + self._drop(self._attend(x_BTD)))
            y_BTD: Tensor = self.norm2(x_BTD + self._drop(self._mlp(x_BTD)))
            return y_BTD
        x_BTD = x_BTD + self._drop(self._attend(self.norm1(x_BTD)))
        return x_BTD + self._drop(self._mlp(self.norm2(x_BTD)))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        qkv_BTHC3 = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1))
        q_BHTC, k_BHTC, v_BHTC = qkv_BTHC3.permute(2, 0, 3, 1, 4).unbind(0)
        if self.written_out:
            scores_BHTT = q_BHTC @ k_BHTC.transpose(-1, -2) / math.sqrt(q_BHTC.shape[-1])
            future_TT = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=x_BTD.device).triu(1)
            weights_BHTT = self._drop(scores_BHTT.masked_fill(future_TT, -math.inf).softmax(-1))
            mixed_BHTC = weights_BHTT @ v_BHTC
        else:
            mixed_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC, is_causal=not self.post_norm)
        y_BTD: Tensor = self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        return y_BTD

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down(F.gelu(self.up(x_BTD)))
        return y_BTD

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class LlamaLayer(nn.Module):
    """Llama's layer: RMSNorm, rotary positions, SwiGLU, no dropout and no biases.

    Args:
        hidden_dim: D.
        num_heads: H, a divisor of D.
        dropout: not used; Llama has none.
    """

    def __init__(self, hidden_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        inner_dim = 8 * hidden_dim // 3 // 64 * 64
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(hidden_dim)), nn.Parameter(torch.ones(hidden_dim))
        self.q, self.k, self.v, self.out = (nn.Linear(hidden_dim, hidden_dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden_dim, inner_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(inner_dim, hidden_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = _rms_norm(x_BTD, self.norm1)
        q, k, v = (
            linear(y_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        mixed_BHTC = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        y_BTD = _rms_norm(x_BTD, self.norm2)
        z_BTD: Tensor = x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))
        return z_BTD


def _rms_norm(x_BTD: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x_BTD.float()
    return weight_D * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x_BTD.dtype)


def _rotated(x_BHTC: Tensor) -> Tensor:
    tokens, channels = x_BHTC.shape[-2:]
    frequency_C = 10_000.0 ** -(torch.arange(0, channels, 2, device=x_BHTC.device) / channels)
    angle_TC = torch.outer(torch.arange(tokens, device=x_BHTC.device), frequency_C).repeat(1, 2)
    first, second = x_BHTC.chunk(2, -1)
    return x_BHTC * angle_TC.cos().to(x_BHTC.dtype) + torch.cat((-second, first), -1) * angle_TC.sin().to(x_BHTC.dtype)


class GPT(nn.Module):
    """A whole model with its loss: embeddings, layers, a norm, a head, cross entropy.

    Args:
        num_layers: how many layers.
        hidden_dim: D.
        context_length: the most tokens of a sequence.
        vocab_size: V.
    """

    def __init__(self, num_layers: int, *, hidden_dim: int, context_length: int, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, hidden_dim), nn.Embedding(context_length, hidden_dim)
        self.layers = nn.ModuleList(TransformerLayer(hidden_dim, 4) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(hidden_dim), nn.Linear(hidden_dim, vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), targets_BT.flatten())


@dataclass(frozen=True)
class LayerCase:
    """A layer by name.

    Attributes:
        make: (hidden_dim, num_heads, dropout=) -> the layer.
        target: the most that one layer should save for backward, in batch x tokens x hidden x itemsize.
    """

    make: Callable[..., nn.Module]
    target: float


LAYERS: Final = MappingProxyType(
    {
        "GPT, SDPA": LayerCase(TransformerLayer, 10.0),
        "GPT, plain attention": LayerCase(functools.partial(TransformerLayer, written_out=True), 14.0),
        "BERT post-norm": LayerCase(functools.partial(TransformerLayer, post_norm=True), 11.0),
        "Llama": LayerCase(LlamaLayer, 11.0),
    }
)
