"""A small module for each rule, of transformers where that has one, and its inputs."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.activations import FastGELUActivation
from transformers.models.bert.modeling_bert import BertConfig, BertOutput, BertPredictionHeadTransform
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.components.compare import randomise

ROWS: Final = 6
WIDTH: Final = 8


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = self.act(self.w1(hidden_states))
        hidden_states = gate * self.w3(hidden_states)
        hidden_states = self.drop(hidden_states)
        return self.w2(hidden_states)


class PackedFunctional(nn.Module):
    """As in DINOv2."""

    def __init__(self) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x12 = self.w12(x)
        x1, x2 = x12.chunk(2, dim=-1)
        return self.w3(F.silu(x1) * x2)


class FirstRMSNorm(nn.Module):
    """As in the first Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.ones(WIDTH))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), 0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q[None], k[None], v[None], dropout_p=p)[0]


def _sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, WIDTH))


_OF_BERT: Final = BertConfig(hidden_size=WIDTH, intermediate_size=WIDTH, hidden_dropout_prob=0.5)

LAYERS: Final[dict[str, tuple[Callable[[], nn.Module], str]]] = {
    "sequence": (_sequence, "mlp"),
    "gated": (Gated, "gated_mlp"),
    "packed": (lambda: Phi3MLP(Phi3Config(hidden_size=WIDTH, intermediate_size=16)), "packed_gated_mlp"),
    "packed function": (PackedFunctional, "packed_gated_mlp"),
    "first llama": (FirstRMSNorm, "rms_norm"),
    "llama": (lambda: LlamaRMSNorm(WIDTH), "rms_norm"),
    "olmo": (lambda: Olmo2RMSNorm(WIDTH), "rms_norm"),
    "gemma": (lambda: GemmaRMSNorm(WIDTH), "rms_norm_from_one"),
    "t5": (lambda: T5LayerNorm(WIDTH), "wide_rms_norm"),
    "bert": (lambda: BertOutput(_OF_BERT), "dense_dropout_residual_norm"),
    "head": (lambda: BertPredictionHeadTransform(_OF_BERT), "dense_activation_norm"),
    "dropout": (lambda: nn.Dropout(0.5), "dropout"),
    "gelu": (FastGELUActivation, "gelu_tanh"),
    "attention": (Attention, "attention"),
}
"""Each layer, and the rule that fits it."""

DROPPING: Final = ("sequence", "gated", "bert", "dropout", "attention")
"""The layers that drop elements in training."""


def layer(name: str) -> nn.Module:
    """A layer of LAYERS, with random weights."""
    torch.manual_seed(0)
    return randomise(LAYERS[name][0]())


def inputs(name: str) -> tuple[Tensor, ...]:
    """Inputs for a layer of LAYERS, which require gradients."""
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True) for _ in range(2 if name == "bert" else 1)
    )


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout to 0, since eager PyTorch and this library draw different masks; return the model."""
    # Falcon's layers read the probability from the config in each call.
    for holder in (*model.modules(), *([model.config] if hasattr(model, "config") else [])):
        for name, value in vars(holder).items():
            if isinstance(value, float) and (name in ("p", "dropout_prob", "drop_prob") or name.endswith("dropout")):
                setattr(holder, name, 0.0)
    return model
