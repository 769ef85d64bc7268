"""trace -- count what a training step of a model computes and keeps, without running it and without its memory.

The step's numbers are linear in the batch and in the layers. So a model with one layer and one with two are traced,
with batches of two and of four, and the four terms are solved for: an 8B model takes seconds. A model whose layers
differ is traced whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ..._torch.tracing import copy_of
from ...components import Choice, MixtureOfExperts
from ...configs import Config
from ...configs.create import create_model
from ...partition import budget, default, min_cut, partitioner
from ...partition.capture import CapturedGraph, capture
from ...partition.joint_graph import JointGraph
from ...partition.partitioners import SavePolicy
from .graph_work import cut_pass, selective_pass
from .layout import is_budget
from .op_work import eager_pass
from .work import Counted, Pass

_DEPTHS: Final = ("num_layers", "num_decoder_layers")
_BATCHES: Final = (2, 4)
_LAYERS: Final = (1, 2)
# The ways to choose what is saved that the library's partitioners do not name.
EAGER: Final = "eager"
SELECTIVE: Final = "selective"
_DEFAULT: Final = "default"
_MIN_CUT: Final = "min_cut"


@dataclass(frozen=True)
class _Traced:
    """A model with some layers, called with some examples."""

    model: Any
    inputs: tuple[Tensor, ...]
    graphs: tuple[CapturedGraph, ...]

    def cut(self, policy: SavePolicy) -> Pass:
        hidden_dim = getattr(self.model, "hidden_dim", 0)
        return sum((cut_pass(joint, policy, hidden_dim=hidden_dim) for joint in self._joints()), Pass())

    def selective(self) -> Pass:
        hidden_dim = getattr(self.model, "hidden_dim", 0)
        return sum((selective_pass(joint, min_cut, hidden_dim=hidden_dim) for joint in self._joints()), Pass())

    def _joints(self) -> Sequence[JointGraph]:
        return [
            JointGraph.of(
                copy_of(graph.module),
                num_forward_outputs=graph.num_forward_outputs,
                static_input_indices=graph.static_input_indices,
            )
            for graph in self.graphs
        ]


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
        kinds: "eager" (op by op, without `fuse`), a partitioner of `fuse` as in its config, or "selective" (the results
            of attention and half of the matrix products are saved, the rest of a layer is recomputed).
        tokens: of an example; None for all that the model takes.
        dtype: of weights and activations.

    Raises:
        ValueError: the model does not say what it is called with.
        PartitionError: a budget is too small for a layer.
    """
    depth, alike = depth_of(config)
    depths = _LAYERS if alike else (depth,)
    fused = any(kind != EAGER for kind in kinds)
    traced = [
        _trace(config, layers, batch, tokens=tokens, dtype=dtype, fused=fused)
        for layers in depths
        for batch in _BATCHES
    ]
    layers = [layers for layers in depths for _ in _BATCHES]
    cuts = {_MIN_CUT: [one.cut(min_cut) for one in traced]} if fused else {}
    if any(is_budget(kind) for kind in kinds):
        cuts[_DEFAULT] = [one.cut(default) for one in traced]
    for kind in kinds:
        if kind == EAGER:
            cuts[kind] = [eager_pass(one.model, one.inputs) for one in traced]
        elif kind == SELECTIVE:
            cuts[kind] = [one.selective() for one in traced]
        elif kind not in cuts:
            cuts[kind] = [one.cut(policy) for one, policy in zip(traced, _policies(kind, cuts, layers), strict=True)]
    if not alike:
        return {kind: _spread(cuts[kind], depth) for kind in kinds}
    counted = {kind: _solved(cuts[kind]) for kind in cuts if not is_budget(kind)}
    for kind in kinds:
        if is_budget(kind):
            counted[kind] = _beside(counted[_MIN_CUT], cuts[kind])
        elif kind == SELECTIVE:
            # It is about layers: outside of them a run saves what the cheapest cut saves.
            cheapest, layers_alone = counted[_MIN_CUT], counted[kind]
            counted[kind] = replace(layers_alone, fixed=cheapest.fixed, example=cheapest.example)
    return {kind: counted[kind] for kind in kinds}


def _trace(config: Config, layers: int, batch: int, *, tokens: int | None, dtype: torch.dtype, fused: bool) -> _Traced:
    with torch.device("meta"):
        model: Any = create_model(with_depth(config, layers)).to(dtype)
    if not hasattr(model, "example_inputs"):
        raise ValueError(
            f"model {config.model.name!r} does not say what it is called with; give {type(model).__name__} a method "
            'example_inputs(batch_size=1, device="meta")'
        )
    # Which tokens an expert gets depends on their values; how many, where all get as many, does not.
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and module.capacity_factor is None:
            module.capacity_factor = 1.0
    inputs = tuple(model.example_inputs(batch, device="meta"))
    if tokens is not None:
        inputs = tuple(one[:, :tokens].contiguous() if one.dim() == 2 else one for one in inputs)
    inputs = tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs)
    graphs = capture(model, *inputs, backend="inductor") if fused else ()
    return _Traced(model, inputs, graphs)


def _policies(kind: str, cuts: dict[str, list[Pass]], layers: Sequence[int]) -> list[SavePolicy]:
    """Return the partitioner of each traced model.

    A budget is a share of what the whole model saves, most of it in layers. In a model of one layer the loss would take
    its share too, so the share is taken of the layers alone.
    """
    policy = partitioner(kind)
    assert isinstance(policy, SavePolicy)
    if policy.limit is None:
        return [policy] * len(layers)
    if not isinstance(policy.limit, float):
        raise ValueError(f"plan needs a budget as a share, which fits any batch, as budget:0.5, got {kind}")
    if len(set(layers)) == 1:
        return [policy] * len(layers)
    policies: list[SavePolicy] = []
    for index, (cheapest, depth) in enumerate(zip(cuts[_MIN_CUT], layers, strict=True)):
        other = index + len(_BATCHES) if depth == _LAYERS[0] else index - len(_BATCHES)
        layer, layer_of_all = (
            abs(cuts[name][other].saved_bytes - cuts[name][index].saved_bytes) for name in (_MIN_CUT, _DEFAULT)
        )
        less = layer - policy.limit * layer_of_all
        policies.append(budget(int(cheapest.saved_bytes - depth * less)) if less > 0 else min_cut)
    return policies


def _solved(cuts: Sequence[Pass]) -> Counted:
    """Solve for the four terms: of one layer and of two, with batches of two and of four."""
    one_two, one_four, two_two, two_four = cuts
    layer_two, layer_four = two_two - one_two, two_four - one_four
    layer_example = (layer_four - layer_two) * 0.5
    layer_fixed = layer_two - layer_example * 2
    example = (one_four - one_two) * 0.5 - layer_example
    fixed = one_two - example * 2 - layer_two
    # The step needs it once: at the loss, or in a layer. A model of one layer has both.
    working = max(one_four.working_bytes - one_two.working_bytes, 0.0) / 2
    return Counted(
        fixed=replace(fixed, working_bytes=max(one_two.working_bytes - 2 * working, 0.0)),
        example=replace(example, working_bytes=working),
        layer_fixed=replace(layer_fixed, working_bytes=0.0),
        layer_example=replace(layer_example, working_bytes=0.0),
    )


def _beside(known: Counted, cuts: Sequence[Pass]) -> Counted:
    """Solve for the layers of two-layer models alone: all else is as in a known solution.

    A budget saves less than its limit where values are large, and how much less depends on what else there is.
    """
    two, four = ((cut - known.rest(batch)) * 0.5 for cut, batch in zip(cuts[-2:], _BATCHES, strict=True))
    example = (four - two) * 0.5
    return Counted(
        known.fixed,
        known.example,
        replace(two - example * 2, working_bytes=0.0),
        replace(example, working_bytes=0.0),
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
