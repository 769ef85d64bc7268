"""model -- what a plan needs to know of a config's model: numbers only, once it is made."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...configs import Config
from ...configs.create import create_model
from .layout import Layout
from .memory import Sizes
from .trace import EAGER, count, depth_of, with_depth
from .work import Counted

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlannedModel:
    """A model's numbers.

    Attributes:
        name: of its config.
        sizes: of its parameters.
        tokens: of an example; 1 for a model without tokens.
        low_precision: whether products run in bfloat16.
        run_kind: how values are chosen to be saved without checkpointing: "eager", or a partitioner of `fuse`.
        counted: by kind: the step's numbers.
        heads: of the attention; None without.
        kv_heads: its key-value heads.
    """

    name: str
    sizes: Sizes
    tokens: int
    low_precision: bool
    run_kind: str
    counted: Mapping[str, Counted]
    heads: int | None
    kv_heads: int | None

    @property
    def precision(self) -> str:
        """The dtype of products."""
        return "bfloat16" if self.low_precision else "float32"

    def kind_of(self, layout: Layout) -> str:
        """Return the key in `counted` of what a layout saves."""
        return self.run_kind if layout.checkpointing in ("none", "block") else layout.checkpointing

    def flops(self, kind: str, *, stream_only: bool = False) -> float:
        """FLOPs of a step for one example; a causal attention's without the scores that its kernel skips."""
        one = self.counted[kind].step(1, num_layers=self.sizes.num_layers)
        again = self.counted[kind].layer(1).forward.flops * self.sizes.num_layers if stream_only else 0.0
        return one.forward.flops + one.backward.flops + again

    @property
    def model_flops(self) -> float:
        """FLOPs of a step for one example by the usual count for utilisation (Chowdhery et al., "PaLM", 2022, appendix
        B): nothing is recomputed, and a causal attention counts all scores, three times those of its forward."""
        one = self.counted[self.run_kind].step(1, num_layers=self.sizes.num_layers)
        # Forward's matrix products and their two in backward, which no partitioner but a budget repeats.
        products = min(
            counted.step(1, num_layers=self.sizes.num_layers).forward.matmul_flops
            + counted.step(1, num_layers=self.sizes.num_layers).backward.matmul_flops
            for counted in self.counted.values()
        )
        return products + 6.0 * one.forward.attention_flops


def planned_model(
    config: Config, *, checkpointing: Sequence[str], low_precision: bool, name: str | None = None
) -> PlannedModel:
    """Return the numbers of a config's model.

    Args:
        config: of the run.
        checkpointing: what layouts will ask for.
        low_precision: whether products run in bfloat16.
        name: of the model; None for that of its class.

    Raises:
        ValueError: the model does not say what it is called with.
        PartitionError: a budget is too small.
    """
    fusion, options = config.fusion, config.model.options
    run_kind = EAGER if fusion.scope == "none" else fusion.partition
    kinds = dict.fromkeys([EAGER, run_kind, *(one for one in checkpointing if one not in ("none", "block"))])
    dtype = torch.bfloat16 if low_precision else torch.float32
    context = options.get("context_length")
    tokens = config.data.sequence_length or context
    if tokens and context and tokens > context:
        raise ValueError(f"data.sequence_length is {tokens} tokens, and the model's context {context}; lower it")
    counted = count(config, kinds=list(kinds), tokens=tokens if tokens != context else None, dtype=dtype)
    attention = config.attention.options
    heads = attention.get("num_heads")
    return PlannedModel(
        name=name or config.model.name,
        sizes=_sizes(config, tokens or 1, dtype),
        tokens=tokens or 1,
        low_precision=low_precision,
        run_kind=run_kind,
        counted=counted,
        heads=heads,
        kv_heads=attention.get("num_kv_heads") or heads,
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
    with torch.device("meta"):
        model = create_model(with_depth(config, layers))
    return {name: tuple(one.shape) for name, one in model.named_parameters()}
