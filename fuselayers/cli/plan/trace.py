"""trace -- count what a training step of a model computes and keeps, without running it and without its memory.

The step's numbers are linear in the batch and in the layers. So a model with one layer and one with two are traced,
with batches of two and of four, and the four terms are solved for: an 8B model takes seconds. A model whose layers
differ is traced whole; so is one with a budget, which is a share of the whole, or four and eight of its layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ...components import Choice
from ...configs import Config
from ...configs.create import check_described, create_model
from ...partition import partitioner
from ...partition.capture import CapturedGraph, capture
from ...partition.partitioners import SavePolicy
from .graph_work import cut_pass, selective_pass
from .layout import is_budget
from .op_work import eager_pass
from .work import Counted, Pass

_DEPTHS: Final = ("num_layers", "num_decoder_layers")
_BATCHES: Final = (2, 4)
_LAYERS: Final = (1, 2)
_LAYERS_OF_BUDGETS: Final = (4, 8)
# The ways to choose what is saved that the library's partitioners do not name.
EAGER: Final = "eager"
SELECTIVE: Final = "selective"
_MIN_CUT: Final = "min_cut"


@dataclass(frozen=True)
class _Traced:
    """A model with some layers, called with some examples."""

    model: Any
    inputs: tuple[Tensor, ...]
    graphs: tuple[CapturedGraph, ...]

    def passes(self, kind: str) -> Pass:
        """Return forward and backward as `kind` chooses what is saved."""
        if kind == EAGER:
            return eager_pass(self.model, self.inputs)
        hidden_dim = getattr(self.model, "hidden_dim", 0)
        total = Pass()
        for graph in self.graphs:
            joint = graph.joint()
            if kind == SELECTIVE:
                total += selective_pass(joint, hidden_dim=hidden_dim)
            else:
                policy = partitioner(kind)
                assert isinstance(policy, SavePolicy)
                if isinstance(policy.limit, int):
                    raise ValueError(f"plan needs a budget as a share, which fits any batch, as budget:0.5, got {kind}")
                total += cut_pass(joint, policy, hidden_dim=hidden_dim)
        return total


def depth_of(config: Config) -> tuple[int, bool]:
    """Return how many layers a model has (one of a decoder and one of its encoder count as one), and whether all are
    alike, so that two of them tell the cost of all."""
    options = config.model.options
    depths = {options[name] for name in _DEPTHS if options.get(name)}
    alike = len(depths) == 1 and not any(options.get(name) for name in ("layers", "decoder_layers"))
    return (max(depths), alike) if depths else (1, False)


def with_depth(config: Config, num_layers: int) -> Config:
    """Return the config of the same model with another number of layers, and without fusion."""
    options = {name: num_layers if name in _DEPTHS and value else value for name, value in config.model.options.items()}
    model = Choice(config.model.name, options)
    return replace(config, model=model, fusion=replace(config.fusion, scope="none"))


def count(config: Config, *, kinds: Sequence[str], tokens: int | None, dtype: torch.dtype) -> dict[str, Counted]:
    """Return the step's numbers for each way to choose what is saved.

    Args:
        config: of the model.
        kinds: "eager" (op by op, without `fuse`), a partitioner of `fuse` as in its config, or "selective" (see
            `graph_work.selective_pass`).
        tokens: of an example; None for all that the model takes.
        dtype: of weights and activations.

    Raises:
        ValueError: the model does not say what it is called with.
        PartitionError: a budget is too small for a layer.
    """
    depth, alike = depth_of(config)
    counted: dict[str, Counted] = {}
    plain = [kind for kind in kinds if not is_budget(kind)]
    if plain:
        counted = _counted(config, plain, depths=_LAYERS if alike else (depth,), tokens=tokens, dtype=dtype)
    for kind in filter(is_budget, kinds):
        # In a model of two layers a budget would be spent on the loss.
        depths = _LAYERS_OF_BUDGETS if alike and depth > max(_LAYERS_OF_BUDGETS) else (depth,)
        counted |= _counted(config, [kind], depths=depths, tokens=tokens, dtype=dtype)
    return counted


def _counted(
    config: Config, kinds: Sequence[str], *, depths: Sequence[int], tokens: int | None, dtype: torch.dtype
) -> dict[str, Counted]:
    fused = any(kind != EAGER for kind in kinds)
    traced = [
        _trace(config, layers, batch, tokens=tokens, dtype=dtype, fused=fused)
        for layers in depths
        for batch in _BATCHES
    ]

    def solved(kind: str) -> Counted:
        cuts = [one.passes(kind) for one in traced]
        return _solved(cuts, depths) if len(depths) == 2 else _spread(cuts, depths[0])

    counted = {kind: solved(kind) for kind in kinds}
    if SELECTIVE in counted:
        # It is about layers: outside of them a run saves what the cheapest cut saves.
        cheapest = counted.get(_MIN_CUT) or solved(_MIN_CUT)
        counted[SELECTIVE] = replace(counted[SELECTIVE], fixed=cheapest.fixed, example=cheapest.example)
    return counted


def meta_model(config: Config, num_layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model of a config with so many layers, without memory.

    Raises:
        ValueError: the model does not say what it is called with.
    """
    with torch.device("meta"):
        model: Any = create_model(with_depth(config, num_layers)).to(dtype)
    check_described(config, model)
    return model


def _trace(config: Config, layers: int, batch: int, *, tokens: int | None, dtype: torch.dtype, fused: bool) -> _Traced:
    model = meta_model(config, layers, dtype)
    inputs = tuple(model.example_inputs(batch, device="meta"))
    if tokens is not None:
        inputs = tuple(one[:, :tokens].contiguous() if one.dim() == 2 else one for one in inputs)
    inputs = tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs)
    graphs = capture(model, *inputs, backend="inductor") if fused else ()
    return _Traced(model, inputs, graphs)


def _solved(cuts: Sequence[Pass], depths: Sequence[int]) -> Counted:
    """Solve for the four terms: of two depths, with batches of two and of four each."""
    few_two, few_four, many_two, many_four = cuts
    few, many = depths
    layer_two, layer_four = (
        (more - less) * (1 / (many - few)) for more, less in ((many_two, few_two), (many_four, few_four))
    )
    layer_example = (layer_four - layer_two) * 0.5
    layer_fixed = layer_two - layer_example * 2
    example = (few_four - few_two) * 0.5 - layer_example * few
    fixed = few_two - example * 2 - layer_two * few
    # The step needs it once: at the loss, or in a layer. A model of few layers has both.
    working = max(few_four.working_bytes - few_two.working_bytes, 0.0) / 2
    return Counted(
        fixed=replace(fixed, working_bytes=max(few_two.working_bytes - 2 * working, 0.0)),
        example=replace(example, working_bytes=working),
        layer_fixed=replace(layer_fixed, working_bytes=0.0),
        layer_example=replace(layer_example, working_bytes=0.0),
    )


def _spread(cuts: Sequence[Pass], num_layers: int) -> Counted:
    """Spread a whole model evenly over its layers."""
    two, four = cuts
    example = (four - two) * 0.5
    fixed = two - example * 2
    return Counted(
        fixed=Pass(working_bytes=max(fixed.working_bytes, 0.0)),
        example=Pass(working_bytes=example.working_bytes),
        layer_fixed=replace(fixed * (1 / num_layers), working_bytes=0.0),
        layer_example=replace(example * (1 / num_layers), working_bytes=0.0),
    )
