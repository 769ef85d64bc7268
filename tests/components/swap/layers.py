"""A small module for each rule, written as some library writes it, and its inputs."""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.out, self.act = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(x)
        gate, x = x.chunk(2, dim=-1)
        x = x * self.act(gate)
        return self.out(x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(WIDTH)), 1e-6


class Llamas(Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Olmos(Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(input_dtype)


class Gemmas(Norm):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class T5s(Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.5)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.LayerNorm(hidden_states + input_tensor)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.transform_act_fn, self.LayerNorm = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.transform_act_fn(hidden_states)
        return self.LayerNorm(hidden_states)


class Tangent(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1.0 + torch.tanh(input * 0.7978845608 * (1.0 + 0.044715 * input * input)))


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


LAYERS: Final[dict[str, tuple[Callable[[], nn.Module], str]]] = {
    "sequence": (_sequence, "mlp"),
    "gated": (Gated, "gated_mlp"),
    "packed": (Packed, "packed_gated_mlp"),
    "llama": (Llamas, "rms_norm"),
    "olmo": (Olmos, "rms_norm"),
    "gemma": (Gemmas, "rms_norm_from_one"),
    "t5": (T5s, "wide_rms_norm"),
    "bert": (Output, "dense_dropout_residual_norm"),
    "head": (Head, "dense_activation_norm"),
    "dropout": (lambda: nn.Dropout(0.5), "dropout"),
    "gelu": (Tangent, "gelu_tanh"),
    "attention": (Attention, "attention_dropout"),
}
"""Each layer, and the rule that fits it."""

DROPPING: Final = ("sequence", "gated", "bert", "dropout", "attention")
"""The layers that drop elements in training."""


def layer(name: str, **factory: Any) -> nn.Module:
    """A layer of LAYERS."""
    torch.manual_seed(0)
    with torch.device(factory.get("device", "cpu")):
        return LAYERS[name][0]()


def inputs(name: str, **factory: Any) -> tuple[Tensor, ...]:
    """Inputs for a layer of LAYERS, which require gradients."""
    generator = None if "device" in factory else torch.Generator().manual_seed(1)
    count = 2 if name == "bert" else 1
    return tuple(torch.randn(ROWS, WIDTH, generator=generator, **factory).requires_grad_() for _ in range(count))


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout to 0, since eager PyTorch and this library draw different masks; return the model."""
    # Falcon's layers read the probability from the config in each call.
    for holder in (*model.modules(), *([model.config] if hasattr(model, "config") else [])):
        for name, value in vars(holder).items():
            if isinstance(value, float) and (name in ("p", "dropout_prob", "drop_prob") or name.endswith("dropout")):
                setattr(holder, name, 0.0)
    return model
