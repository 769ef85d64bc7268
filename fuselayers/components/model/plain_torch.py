"""A model's twin in plain PyTorch, written without this library. The baseline of `bench model` and `train`.

The twin takes its sizes and weights from the built model, and its code from torch alone: nn.LayerNorm, nn.RMSNorm,
nn.Dropout, F.gelu, scaled_dot_product_attention, F.cross_entropy. Parameters have the same names, so a
state_dict fits both. GPT, Llama, BERT and ViT have twins.

B batch, T tokens, D hidden, H heads, G heads of keys and values, C channels of a head, V vocabulary
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...partition import eager_view
from ..attention import MultiHeadAttention
from ..block import TransformerBlock
from ..feedforward import MLP, FusedMLP, GatedMLP
from ..norm import LayerNorm, RMSNorm
from ..position import LearnedPosition, RotaryPosition
from ..residual import PostResidual, PreResidual
from .decoder import Decoder
from .encoder import Encoder
from .vision_transformer import VisionTransformer

_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
    }
)


def plain_twin(model: nn.Module) -> nn.Module:
    """Return the model in plain PyTorch, with a copy of its weights, its device, dtype and mode.

    Raises:
        ValueError: no twin is known for one of its components.
    """
    model = eager_view(model)
    twins: dict[type[nn.Module], type[nn.Module]] = {Decoder: _GPT, Encoder: _BERT, VisionTransformer: _ViT}
    if type(model) not in twins:
        raise _no_twin(model)
    weights = next(model.parameters())
    with torch.random.fork_rng(devices=[]):
        twin = twins[type(model)](model)
    twin.load_state_dict(model.state_dict())
    return twin.to(device=weights.device, dtype=weights.dtype).train(model.training)


class _Attention(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        _check(of, MultiHeadAttention)
        special = (of.window, of.soft_cap, of.sinks, of.q_norm, of.k_norm)
        usual = of.projections == "packed" and of.scale == 1 / math.sqrt(of.head_dim)
        if any(option is not None for option in special) or not usual:
            raise _no_twin(of)
        self.sizes = [heads * of.head_dim for heads in (of.num_heads, of.num_kv_heads, of.num_kv_heads)]
        self.head_dim, self.causal, self.dropout = of.head_dim, of.causal, of.dropout
        self.qkv, self.out = _linear(of.qkv), _linear(of.out)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor | None, sin_TC: Tensor | None) -> Tensor:
        parts = self.qkv(x_BTD).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if cos_TC is not None and sin_TC is not None:
            q, k = (x * cos_TC + _rotated_half(x) * sin_TC for x in (q, k))
        p = self.dropout if self.training else 0.0
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal, enable_gqa=grouped)
        projected: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return projected


def _rotated_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class _MLP(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        _check(of, MLP, FusedMLP, GatedMLP)
        if of.activation not in _ACTIVATIONS or getattr(of, "packed", False):
            raise _no_twin(of)
        self.activation = _ACTIVATIONS[of.activation]
        self.drop = nn.Dropout(of.dropout)
        self.gate = _linear(of.gate) if isinstance(of, GatedMLP) else None
        self.up, self.down = _linear(of.up), _linear(of.down)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = self.activation(hidden) if self.gate is None else self.activation(self.gate(x)) * hidden
        y: Tensor = self.down(self.drop(hidden))
        return y


class _Block(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        _check(of, TransformerBlock)
        _check(of.residual, PreResidual, PostResidual)
        if of.cross_attention is not None or len(of.residual.scales) or of.residual.skipped:
            raise _no_twin(of)
        self.attention, self.feedforward = _Attention(of.attention), _MLP(of.feedforward)
        self.residual: Any = nn.ModuleDict({"norms": nn.ModuleList(map(_norm, of.residual.norms))})
        self.post_norm, self.drop = isinstance(of.residual, PostResidual), nn.Dropout(of.residual.dropout)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor | None, sin_TC: Tensor | None) -> Tensor:
        norm1, norm2 = self.residual["norms"]
        if self.post_norm:
            x_BTD = norm1(x_BTD + self.drop(self.attention(x_BTD, cos_TC, sin_TC)))
            y_BTD: Tensor = norm2(x_BTD + self.drop(self.feedforward(x_BTD)))
            return y_BTD
        x_BTD = x_BTD + self.drop(self.attention(norm1(x_BTD), cos_TC, sin_TC))
        z_BTD: Tensor = x_BTD + self.drop(self.feedforward(norm2(x_BTD)))
        return z_BTD


class _Stack(nn.Module):
    """Positions, dropout, blocks and the last norm of every model."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        _check(of.position, LearnedPosition, RotaryPosition)
        self.drop = nn.Dropout(getattr(of, "embedding_dropout", of.dropout))
        self.blocks = nn.ModuleList(map(_Block, of.blocks))
        self.norm = None if of.norm is None else _norm(of.norm)
        self.position: Any = None
        if isinstance(of.position, LearnedPosition):
            self.position = nn.ModuleDict({"table": _embedding(of.position.table)})
        else:
            if of.position.interleaved or of.position.fraction != 1 or of.position.scaling != "none":
                raise _no_twin(of.position)
            head_dim = of.blocks[0].attention.head_dim
            speed = of.position.base ** -(torch.arange(0, head_dim, 2) / head_dim)
            angle_TC = torch.outer(torch.arange(of.context_length), speed).repeat(1, 2)
            self.cos: Tensor
            self.sin: Tensor
            self.register_buffer("cos", angle_TC.cos(), persistent=False)
            self.register_buffer("sin", angle_TC.sin(), persistent=False)

    def placed(self, x_BTD: Tensor) -> Tensor:
        if self.position is None:
            return x_BTD
        y_BTD: Tensor = x_BTD + self.position["table"](torch.arange(x_BTD.shape[1], device=x_BTD.device))
        return y_BTD

    def run(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.drop(x_BTD)
        tokens = x_BTD.shape[1]
        cos_TC, sin_TC = (None, None) if self.position is not None else (self.cos[:tokens], self.sin[:tokens])
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TC, sin_TC)
        return x_BTD if self.norm is None else self.norm(x_BTD)


class _GPT(_Stack):
    def __init__(self, of: Any) -> None:
        super().__init__(of)
        special = (of.logit_soft_cap, of.bias, of.embedding_norm)
        if any(option is not None for option in special) or of.logit_scale != 1:
            raise _no_twin(of)
        self.token = _embedding(of.token)
        self.head = None if of.head is None else _linear(of.head)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.run(self.placed(self.token(tokens_BT)))
        logits_BTV = F.linear(x_BTD, self.token.weight) if self.head is None else self.head(x_BTD)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class _BERT(_Stack):
    def __init__(self, of: Any) -> None:
        super().__init__(of)
        if of.segment is None or of.head is not None or of.logit_scale != 1:
            raise _no_twin(of)
        self.token, self.segment = _embedding(of.token), _embedding(of.segment)
        self.embedding_norm, self.head_norm = _norm(of.embedding_norm), _norm(of.head_norm)
        self.head_dense = _linear(of.head_dense)
        self.bias = nn.Parameter(torch.empty_like(of.bias))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.placed(self.token(tokens_BT)) + self.segment(torch.zeros_like(tokens_BT))
        x_BTD = self.run(self.embedding_norm(x_BTD))
        x_BTD = self.head_norm(F.gelu(self.head_dense(x_BTD)))
        logits_BTV = F.linear(x_BTD, self.token.weight, self.bias)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class _ViT(_Stack):
    def __init__(self, of: Any) -> None:
        super().__init__(of)
        if of.class_token is None or of.logit_scale != 1:
            raise _no_twin(of)
        self.class_token = nn.Parameter(torch.empty_like(of.class_token))
        conv, self.head = of.patch.projection, _linear(of.head)
        side, bias = conv.kernel_size[0], conv.bias is not None
        projection = nn.Conv2d(conv.in_channels, conv.out_channels, side, stride=side, bias=bias)
        self.patch: Any = nn.ModuleDict({"projection": projection})

    def forward(self, images: Tensor, targets_B: Tensor) -> Tensor:
        patches_BTD = self.patch["projection"](images).flatten(2).transpose(1, 2)
        x_BTD = torch.cat((self.class_token.expand(images.shape[0], 1, -1), patches_BTD), dim=1)
        return F.cross_entropy(self.head(self.run(self.placed(x_BTD))[:, 0]), targets_B)


def _linear(of: nn.Linear) -> nn.Linear:
    return nn.Linear(of.in_features, of.out_features, bias=of.bias is not None)


def _embedding(of: nn.Embedding) -> nn.Embedding:
    if getattr(of, "scale", False):
        raise _no_twin(of)
    return nn.Embedding(of.num_embeddings, of.embedding_dim)


def _norm(of: Any) -> nn.Module:
    _check(of, LayerNorm, RMSNorm)
    if isinstance(of, LayerNorm):
        return nn.LayerNorm(of.hidden_dim, eps=of.eps, bias=of.bias is not None)
    if of.unit_offset:
        raise _no_twin(of)
    return nn.RMSNorm(of.hidden_dim, eps=of.eps)


def _check(component: Any, *known: type[nn.Module]) -> None:
    if type(eager_view(component)) not in known:  # a block may be fused by itself
        raise _no_twin(component)


def _no_twin(component: Any) -> ValueError:
    text = str(component).partition("\n")[0].removesuffix("(")
    return ValueError(f"no model in plain PyTorch is known for {text}")
