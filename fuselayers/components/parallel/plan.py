"""The plan of which parameters of a model are cut, and how. It is made, with all checks, before any change.

A pair of linear layers with only elementwise functions between them, as in an MLP, is cut along the hidden values: the
first matrix by its rows, which gives a process its own hidden values without communication, the second by its columns,
which gives a term of the result. An attention is cut by its heads. (Shoeybi et al., "Megatron-LM", 2019, section 3;
tokens: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2.)

A module without a rule here is rejected, because a wrong cut gives a wrong result, not an error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from ...partition import eager_view
from ..attention import (
    FavorAttention,
    LinearAttention,
    LinformerAttention,
    LocalAttention,
    MultiHeadAttention,
    NystromAttention,
)
from ..block import TransformerBlock
from ..embedding import PatchEmbedding, TokenEmbedding
from ..feedforward import MLP, ConvMLP, FusedMLP, GatedMLP, MixtureOfExperts
from ..linear import Linear
from ..model import Decoder, Encoder, EncoderDecoder, HierarchicalVision, VisionTransformer
from ..model.stack import Stack
from ..norm import DynamicTanh, LayerNorm, RMSNorm, SkipNorm
from ..position import (
    ALiBiPosition,
    LearnedPosition,
    NoPosition,
    RelativePosition,
    RotaryPosition,
    SinusoidalPosition,
)
from ..registry import KINDS, get, names, title
from ..residual import DeepNormResidual, ParallelResidual, PostResidual, PreResidual, SandwichResidual
from .weights import Storage

COPY: Final = Storage("copy")
TABLE: Final = Storage("table")
ROWS: Final = Storage("part", 0)
COLUMNS: Final = Storage("part", 1)
FIRST: Final = Storage("first")


@dataclass
class Plan:
    """The changes to a model.

    Attributes:
        size: the number of processes.
        storages: how the parameters of each module are stored, by name.
        numbers: attributes that get a new value: module, name, value.
        layouts: the modules that get the layout of the group.
    """

    size: int
    storages: dict[nn.Module, dict[str, Storage]] = field(default_factory=dict)
    numbers: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    layouts: list[nn.Module] = field(default_factory=list)

    def add(self, module: nn.Module, storage: Storage) -> None:
        """Plan the same storage for every parameter that the module itself holds."""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.storages.setdefault(module, {})[name] = storage

    def linear(self, path: str, layer: nn.Module, weight: Storage, bias: Storage) -> None:
        """Plan the storage of a linear layer or a convolution."""
        if type(layer) not in (Linear, nn.Linear, nn.Conv1d, nn.Conv2d) or "forward" in layer.__dict__:
            raise ValueError(
                f"{path} must be a plain linear layer, which parallelize can split, got {type(layer).__name__}; "
                "parallelize the model before you put adapters around its layers"
            )
        self.add(layer, weight)
        if layer._parameters.get("bias") is not None:
            self.storages[layer]["bias"] = bias

    def divide(self, path: str, name: str, number: int) -> int:
        """Return each process's share of a number of heads or hidden values."""
        if number % self.size:
            raise ValueError(
                f"{path} has {number} {name}, which {self.size} processes cannot share; "
                f"use a group whose size divides {number}, or build the model with another number"
            )
        return number // self.size

    def visit(self, path: str, module: nn.Module) -> None:
        """Plan a module by the planner of its class.

        Raises:
            ValueError: the class has no planner, or its sizes do not divide.
        """
        module = eager_view(module)
        planner = _PLANNERS.get(type(module))
        if planner is None:
            raise ValueError(_no_planner(path, module))
        planner(self, path, module)


def make_plan(model: nn.Module, size: int) -> Plan:
    """Return the plan of a model for a group of `size` processes.

    Raises:
        ValueError: a component has no planner, or its sizes do not divide, or modules share a parameter.
    """
    plan = Plan(size)
    plan.visit("", model)
    seen: dict[int, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            raise ValueError(
                f"{seen[id(parameter)]} and {path} are tied, and parallelize would untie them; tie them by an "
                "option of the model, such as tie_embeddings"
            )
        seen[id(parameter)] = path
    planned = {id(module._parameters[name]) for module, names in plan.storages.items() for name in names}
    for path, parameter in model.named_parameters():
        if id(parameter) not in planned:
            raise ValueError(
                f"parallelize has no plan for the parameter {path}, which the component's class does not define; "
                "remove it, or split the model with torch's parallelize_module"
            )
    return plan


def _no_planner(path: str, module: nn.Module) -> str:
    kinds = [kind for kind in KINDS if type(module) in (get(kind, name) for name in names(kind))]
    divided = [name for kind in kinds for name in names(kind) if get(kind, name) in _PLANNERS]
    advice = f"use one of these, which have a plan: {', '.join(divided)}"
    if not divided:
        advice = "use a component of this package, and parallelize before other code wraps it"
    return f"parallelize has no plan for {path or 'the model'}, {title(module)}; {advice}"


def _model(plan: Plan, path: str, model: Any) -> None:
    path = f"{path}." if path else ""
    plan.layouts.append(model)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            _parts(plan, f"{path}{name}", child)
        elif isinstance(child, nn.Linear):
            # The rows of a head are cut only to save memory: a process computes all logits of its own tokens.
            plan.linear(f"{path}{name}", child, _table(plan, child) if name == "head" else COPY, COPY)
        else:
            plan.visit(f"{path}{name}", child)
    plan.add(model, COPY)


def _block(plan: Plan, path: str, block: Any) -> None:
    plan.layouts.append(block)
    for name in ("attention", "cross_attention", "feedforward", "residual"):
        child = getattr(block, name)
        if child is not None:
            plan.visit(f"{path}.{name}", child)


def _attention(plan: Plan, path: str, attention: Any) -> None:
    plan.layouts.append(attention)
    heads, kv_heads, channels = attention.num_heads, attention.num_kv_heads, attention.head_dim
    plan.numbers += [
        (attention, "num_heads", plan.divide(path, "heads", heads)),
        (attention, "num_kv_heads", plan.divide(path, "key-value heads", kv_heads)),
    ]
    packed = Storage("packed", sizes=(heads * channels, kv_heads * channels, kv_heads * channels))
    for name, child in attention.named_children():
        if name == "qkv":
            plan.linear(f"{path}.{name}", child, packed, packed)
        elif name in ("q", "k", "v"):
            plan.linear(f"{path}.{name}", child, ROWS, ROWS)
        elif name == "out":
            plan.linear(f"{path}.{name}", child, COLUMNS, FIRST)
        elif name == "value_conv":
            _depthwise(plan, f"{path}.{name}", child)
        elif isinstance(child, nn.Linear):  # linformer's projections of tokens
            plan.linear(f"{path}.{name}", child, COPY, COPY)
        else:
            plan.visit(f"{path}.{name}", child)
    plan.add(attention, ROWS)  # the sinks


def _depthwise(plan: Plan, path: str, conv: Any) -> None:
    # One filter for each head or hidden channel.
    plan.linear(path, conv, ROWS, ROWS)
    plan.numbers += [
        (conv, name, getattr(conv, name) // plan.size) for name in ("groups", "in_channels", "out_channels")
    ]


def _feedforward(plan: Plan, path: str, feedforward: Any) -> None:
    plan.layouts.append(feedforward)
    if feedforward.custom_activation is not None:
        raise ValueError(
            f"{path} has the activation {feedforward.activation!r}, and parallelize splits only activations "
            "that are known to be elementwise; use one of fuselayers.ops.ACTIVATIONS"
        )
    plan.linear(f"{path}.down", feedforward.down, COLUMNS, FIRST)
    width = feedforward.down.in_features
    plan.divide(path, "hidden values", width)
    for name, child in feedforward.named_children():
        if name == "conv":
            _depthwise(plan, f"{path}.{name}", child)
        elif name != "down":
            storage = Storage("packed", sizes=(width, width)) if name == "gate_up" else ROWS
            plan.linear(f"{path}.{name}", child, storage, storage)


def _mixture(plan: Plan, path: str, mixture: Any) -> None:
    plan.linear(f"{path}.router", mixture.router, COPY, COPY)
    for name in ("experts", "shared"):
        _parts(plan, f"{path}.{name}", getattr(mixture, name))


def _residual(plan: Plan, path: str, residual: Any) -> None:
    plan.add(residual.scales, COPY)
    _parts(plan, f"{path}.norms", residual.norms)


def _parts(plan: Plan, path: str, modules: nn.ModuleList) -> None:
    for number, module in enumerate(modules):
        plan.visit(f"{path}.{number}", module)


def _copied(plan: Plan, path: str, module: nn.Module) -> None:
    for part in module.modules():
        plan.add(part, COPY)


def _relative(plan: Plan, path: str, position: Any) -> None:
    plan.divide(path, "heads", position.table.embedding_dim)
    plan.add(position.table, COLUMNS)


def _alibi(plan: Plan, path: str, position: Any) -> None:
    plan.divide(path, "heads", position.num_heads)
    plan.layouts.append(position)


def _embedding(plan: Plan, path: str, table: Any) -> None:
    plan.add(table, _table(plan, table))


def _table(plan: Plan, module: Any) -> Storage:
    # FSDP cannot shard uneven parts further.
    return COPY if module.weight.shape[0] % plan.size else TABLE


_Planner = Callable[[Plan, str, Any], None]

_PLANNERS: Final[dict[type[nn.Module], _Planner]] = {
    **dict.fromkeys((Decoder, Encoder, EncoderDecoder, HierarchicalVision, VisionTransformer, Stack), _model),
    TransformerBlock: _block,
    **dict.fromkeys(
        (MultiHeadAttention, LocalAttention, LinearAttention, FavorAttention, NystromAttention, LinformerAttention),
        _attention,
    ),
    **dict.fromkeys((MLP, FusedMLP, GatedMLP, ConvMLP), _feedforward),
    MixtureOfExperts: _mixture,
    **dict.fromkeys((PreResidual, PostResidual, DeepNormResidual, SandwichResidual, ParallelResidual), _residual),
    **dict.fromkeys((LayerNorm, RMSNorm, DynamicTanh, SkipNorm), _copied),
    **dict.fromkeys(
        (NoPosition, LearnedPosition, SinusoidalPosition, RotaryPosition, PatchEmbedding, nn.Embedding), _copied
    ),
    RelativePosition: _relative,
    ALiBiPosition: _alibi,
    TokenEmbedding: _embedding,
}
