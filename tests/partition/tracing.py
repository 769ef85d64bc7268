"""Joint graphs for the partition tests, as AOTAutograd passes them to a partitioner, the models behind them, and the
allocator's peak in a training step."""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.torch_min_cut import torch_min_cut_at_budget
from fuselayers._torch.guards import torch_compile
from fuselayers._torch.tracing import aot_autograd, make_boxed_func, torch_default_partition
from fuselayers.partition.choose.cost import flops_of
from fuselayers.partition.choose.partitioners import Partitioner, SavePolicy, partitioner
from fuselayers.partition.inspect.capture import capture
from fuselayers.partition.joint_graph import JointGraph

__all__ = [
    "GPT",
    "Traced",
    "called",
    "decomposed",
    "joint_graph_of",
    "ops_of",
    "peak_of_step",
    "recomputed_flops",
    "saved_of",
    "split_of",
    "torchs_choice",
    "traced",
]


@dataclass(frozen=True)
class Traced:
    """A joint graph and the options that a partitioner receives with it."""

    module: fx.GraphModule
    options: dict[str, Any]

    def joint(self) -> JointGraph:
        """A tidied copy of the graph, which a test may change."""
        return JointGraph.of(
            copy.deepcopy(self.module),
            num_forward_outputs=self.options["num_fwd_outputs"],
            static_input_indices=self.options.get("static_lifetime_input_indices"),
        )


def traced(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Traced:
    """The joint graph that a partitioner gets for `fn` without Inductor's decompositions."""
    seen: list[Traced] = []

    def look(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        seen.append(Traced(copy.deepcopy(joint_module), options))
        return torch_default_partition(joint_module, joint_inputs, **options)

    _compile(fn, look, args, dynamic=dynamic)
    return seen[0]


def joint_graph_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> JointGraph:
    """The joint graph of `fn`, not yet split."""
    return traced(fn, *args, dynamic=dynamic).joint()


def split_of(fn: Callable[..., Any], *args: Any, partition: str | Partitioner, fused: bool = True) -> Any:
    """The forward and the backward module that a partitioner makes of `fn`."""
    seen: list[Any] = []
    own = partitioner(partition)
    cut: Any = functools.partial(own, compiler="inductor" if fused else "eager") if isinstance(own, SavePolicy) else own

    def keep(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        seen.append(cut(joint_module, joint_inputs, **options))
        return seen[-1]

    _compile(fn, keep, args)
    return seen[0]


def decomposed(fn: Callable[..., Any], *args: Any) -> Traced:
    """The joint graph that a partitioner gets for `fn` from Inductor; nothing runs."""
    (graph,) = capture(fn, *args, backend="inductor")
    static = list(graph.static_input_indices)
    options = {"num_fwd_outputs": graph.num_forward_outputs, "static_lifetime_input_indices": static}
    return Traced(graph.module, options)


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, dim)
        x = x + F.dropout(self.out(mixed), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), self.p, self.training)


class GPT(nn.Module):
    """A decoder like GPT-2. It takes tokens and returns the loss of predicting them."""

    def __init__(self, *, layers: int, dim: int = 64, heads: int = 4, vocabulary: int = 128, p: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads, p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    @classmethod
    @functools.cache
    def decomposed(cls, *, layers: int, batch: int = 2, tokens: int = 32, **options: Any) -> Traced:
        """The joint graph from Inductor, traced once; tests take copies of it."""
        return decomposed(cls(layers=layers, **options), torch.zeros(batch, tokens, dtype=torch.long))


def torchs_choice(graph: Traced, share: float) -> tuple[JointGraph, list[fx.Node]]:
    """A copy of the joint graph, and the nodes that torch saves under its `activation_memory_budget`."""
    joint = graph.joint()
    static = graph.options["static_lifetime_input_indices"]
    options = {"num_fwd_outputs": joint.num_forward_outputs, "static_lifetime_input_indices": static}
    return joint, torch_min_cut_at_budget(joint.module, share, **options)


def recomputed_flops(joint: JointGraph, saved: list[fx.Node]) -> float:
    """The FLOPs of the recomputed nodes."""
    return sum(flops_of(node) for node in joint.recomputed(saved))


def peak_of_step(model: nn.Module, *inputs: Any) -> int:
    """The peak bytes that forward and backward allocate, measured by torch's profiler."""
    leaves = [tensor for tensor in (*inputs, *model.parameters()) if tensor.requires_grad]

    def step(weights: list[Tensor] | None = None) -> list[Tensor]:
        results = [result for result in tree_leaves(model(*inputs)) if isinstance(result, Tensor)]
        results = [result for result in results if result.requires_grad]
        weights = weights or [torch.ones_like(result) for result in results]
        torch.autograd.grad(results, leaves, weights, allow_unused=True)
        return weights

    weights = step()  # compiles
    with torch.profiler.profile(profile_memory=True) as profile:
        step(weights)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(allocated))


def called(module: Any) -> list[str]:
    """The names of a graph's ops, in order."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def ops_of(module: fx.GraphModule) -> list[str]:
    """The names of a graph's ops without overload and namespace: "sin" for aten.sin.default."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return [str(getattr(node.target, "overloadpacket", node.target).__name__) for node in nodes]


def saved_of(forward: Any, *, outputs: int = 1) -> list[fx.Node]:
    """The nodes that a forward module saves for its backward."""
    return list(forward.graph.output_node().args[0][outputs:])


def _compile(fn: Callable[..., Any], partition_fn: Any, args: tuple[Any, ...], *, dynamic: bool | None = None) -> None:
    backend = aot_autograd(
        fw_compiler=lambda graph_module, _: make_boxed_func(graph_module.forward), partition_fn=partition_fn
    )
    # A new name each time: Dynamo remembers by file, line and name which sizes changed.
    compiled = torch_compile(
        lambda *args: fn(*args),
        name=f"entry_{next(_numbers)}",
        backend=backend,
        recompile_limit=8,
        fullgraph=True,
        dynamic=dynamic,
    )
    compiled(*args)


_numbers = itertools.count()
