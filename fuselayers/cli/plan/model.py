"""model -- what a plan needs to know of a config's model: numbers only, once it is made."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...configs import Config
from .layout import Layout
from .trace import EAGER, count, depth_of, meta_model
from .work import Counted

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """The shapes of a model's parameters, tied ones once.

    Attributes:
        layer: of the parameters of one layer.
        rest: of all others.
        num_layers: how many layers there are.
        stream_bytes: of the input of a layer, for an example.
    """

    layer: tuple[Shape, ...]
    rest: tuple[Shape, ...]
    num_layers: int
    stream_bytes: float

    @property
    def layer_parameters(self) -> int:
        """The parameters of one layer."""
        return sum(map(math.prod, self.layer))

    @property
    def rest_parameters(self) -> int:
        """The parameters outside of the layers."""
        return sum(map(math.prod, self.rest))

    @property
    def parameters(self) -> int:
        """The parameters of the whole model.

        >>> Sizes(((2, 3), (2,)), ((5, 2),), 4, 0.0).parameters
        42
        """
        return self.num_layers * self.layer_parameters + self.rest_parameters


@dataclass(frozen=True)
class PlannedModel:
    """A model's numbers.

    Attributes:
        name: of its config.
        sizes: of its parameters.
        tokens: of an example; 1 for a model without tokens.
        precision: of products: "bfloat16" or "float32".
        run_kind: how values are chosen to be saved without checkpointing: "eager", or a partitioner of `fuse`.
        counted: by kind: the step's numbers.
        heads: of the attention; None without.
        kv_heads: its key-value heads.
    """

    name: str
    sizes: Sizes
    tokens: int
    precision: str
    run_kind: str
    counted: Mapping[str, Counted]
    heads: int | None
    kv_heads: int | None

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the products."""
        return 2 if self.precision == "bfloat16" else 4

    def counted_for(self, layout: Layout) -> Counted:
        """Return the step's numbers for what a layout saves; for recomputed blocks, those of the block's own run."""
        kind = layout.checkpointing
        return self.counted[self.run_kind if kind == "none" or layout.recomputes_blocks else kind]

    def flops(self, kind: str) -> float:
        """FLOPs of a step for one example; a causal attention's without the scores that its kernel skips."""
        return self.counted[kind].step(1, num_layers=self.sizes.num_layers).flops

    @property
    def block_flops(self) -> float:
        """The same where each layer is recomputed."""
        return self.flops(self.run_kind) + self.sizes.num_layers * self.counted[self.run_kind].layer(1).forward.flops

    @property
    def model_flops(self) -> float:
        """FLOPs of a step for one example by the usual count for utilisation (Chowdhery et al., "PaLM", 2022, appendix
        B): nothing is recomputed, and a causal attention counts all scores, three times those of its forward."""
        steps = {kind: one.step(1, num_layers=self.sizes.num_layers) for kind, one in self.counted.items()}
        # Forward's matrix products and their two in backward, which no partitioner but a budget repeats.
        products = min(one.forward.matmul_flops + one.backward.matmul_flops for one in steps.values())
        return products + 6.0 * steps[self.run_kind].forward.attention_flops


def planned_model(
    config: Config, *, checkpointing: Sequence[str], precision: str, name: str | None = None
) -> PlannedModel:
    """Return the numbers of a config's model.

    Args:
        config: of the run.
        checkpointing: what layouts will ask for.
        precision: of products: "bfloat16" or "float32".
        name: of the model; None for that of its class.

    Raises:
        ValueError: the model does not say what it is called with.
        PartitionError: a budget is too small.
    """
    fusion = config.fusion
    run_kind = EAGER if fusion.scope == "none" else fusion.partition
    kinds = dict.fromkeys([EAGER, run_kind, *(one for one in checkpointing if one not in ("none", "block"))])
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    context = config.model.options.get("context_length")
    tokens = config.data.sequence_length or context
    if tokens and context and tokens > context:
        raise ValueError(f"data.sequence_length is {tokens} tokens, and the model's context {context}; lower it")
    heads = config.attention.options.get("num_heads")
    return PlannedModel(
        name=name or config.model.name,
        sizes=_sizes(config, tokens or 1, dtype),
        tokens=tokens or 1,
        precision=precision,
        run_kind=run_kind,
        counted=count(config, kinds=list(kinds), tokens=tokens if tokens != context else None, dtype=dtype),
        heads=heads,
        kv_heads=config.attention.options.get("num_kv_heads") or heads,
    )


def _sizes(config: Config, tokens: int, dtype: torch.dtype) -> Sizes:
    depth, alike = depth_of(config)
    if alike:
        one, two = (_shapes(config, layers) for layers in (1, 2))
        # The second layer's parameters have names of their own.
        layer = tuple(shape for name, shape in two.items() if name not in one)
        rest = list(one.values())
        for shape in layer:
            rest.remove(shape)
    else:
        layer, rest = _parts(_shapes(config, depth), depth)
    width = config.model.options.get("hidden_dim") or 0
    return Sizes(layer, tuple(rest), depth, float(tokens * width * dtype.itemsize))


def _parts(shapes: Mapping[str, Shape], depth: int) -> tuple[tuple[Shape, ...], list[Shape]]:
    """Return the shapes of a layer and of the rest of a model whose layers differ, in a window for example; if they
    differ in their parameters, all are the rest."""
    layers: dict[str, list[Shape]] = {}
    rest: list[Shape] = []
    for name, shape in shapes.items():
        path = re.match(r"(.*?\.[0-9]+)\.", name)
        (rest if path is None else layers.setdefault(path[1], [])).append(shape)
    first, *others = layers.values() if layers else [[]]
    if len(layers) != depth or any(other != first for other in others):
        return (), list(shapes.values())
    return tuple(first), rest


def _shapes(config: Config, layers: int) -> dict[str, Shape]:
    return {name: tuple(one.shape) for name, one in meta_model(config, layers).named_parameters()}
