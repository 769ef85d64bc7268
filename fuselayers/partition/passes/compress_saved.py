"""compress_saved -- save values for backward in fewer bits.

It follows any partitioner: forward returns the compressed value in place of the exact one, and backward restores it
right before its first reader. Both are plain torch ops on rows (the last dimension), which compilers fuse with their
neighbours:

    bfloat16    the value rounded to nearest
    float8      e4m3, x / scale rounded to nearest, with a float32 scale for each row: its largest finite |x| / 416
    int8        floor(x / scale + u), with scale = largest finite |x| / 125.99 and u uniform in (0, 1)
    int16       floor(x / scale + 0.5), with scale = largest finite |x| / 32766; for [factors of exponents], whatever
                compression is asked for

int8 rounds stochastically, so that backward reads the exact value on average. A gradient is a sum of products with that
value, so it has no bias. Infinities and NaN have reserved codes, and a row of zeros has the scale 0.

Note: [one number for a row and one for a column] u[r, c] = frac(a[r] + b[c]) with independent uniform a and b. Any two
of these u are independent, so each sum over a compressed value has the mean and the variance that independent numbers
would give it, and R + C random numbers are enough instead of R * C. They come from `keep_factors`, 16 bits each, and
are added exactly: Inductor and eager round alike. One seed serves all values of a device; each value uses other Philox
groups. The seed is computed from the first seed that forward draws for a dropout, so that the masks equal those of a
run without compression. If another random op comes first, or none, forward draws one more seed, and later random
numbers change.

Note: [what stays exact]

- Values that the caller holds anyway: parameters, inputs without a gradient, outputs. An input with a gradient is the
  result of an earlier graph, which only this graph keeps alive, so it is compressed.
- Statistics, which are small and scale whole rows: the results of reductions (means, deviations, log-sum-exps), and
  each result of an op but its first.
- Values that backward compares with a number. After rounding, backward could take another branch than forward.
- Logarithms whose exponential backward takes, which turns an absolute error into a relative one: a probability of one
  in a million is saved as -14, and a step of int8 is then 0.1.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor

from ..._torch.tracing import is_sym_node, overload_packet, recompiled, size_hint
from ...names import no_such
from ...ops.philox import keep_factors
from ..joint_graph import JointGraph
from ..node_kinds import draws, is_fusible, looks_at_its_input, num_elements, storage_of
from .inlined import inlined
from .seeded_dropout import SEED_OP, cast
from .sensitive_values import Sensitive, is_float, sensitive_in

# Below this a value is not worth two conversions.
_FEWEST_ELEMENTS: Final = 4096
# Below this the scales take too much of the gain.
_SHORTEST_ROW: Final = 16
_SCALE_BYTES: Final = 4
# The bits of the random number of a row or a column.
_BITS: Final = 16
_REDUCES: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("sum", "mean", "amax", "amin", "var", "var_mean", "std", "logsumexp", "linalg_vector_norm", "prod")
)
_SEED: Final = "rounding_seed"
# An arbitrary number, which gives Philox another key than the mask's.
_OTHER_KEY: Final = 0x2545F4914F6CDD1D
COMPRESSED_FROM: Final = "compressed_from"
"""A key of the meta of a forward output that is part of a compressed value: the exact node, and the compression."""


@dataclass(frozen=True)
class Compression:
    """A way to save a float value in fewer bits.

    Attributes:
        name: as `fuse` takes it.
        itemsize: bytes of an element.
        has_scales: whether each row has a float32 scale.
        compress: (value, u) -> its parts; u is None unless `draws`.
        restore: (parts, dtype) -> the value.
        draws: whether it rounds stochastically.
    """

    name: str
    itemsize: int
    has_scales: bool
    compress: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
    restore: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    draws: bool = False

    def bytes_of(self, node: fx.Node) -> int:
        """The compressed bytes of a node's value."""
        elements = num_elements(node)
        rows = elements // max(size_hint(node.meta["val"].shape[-1]), 1) if self.has_scales else 0
        return elements * self.itemsize + rows * _SCALE_BYTES


def _to_bfloat16(x: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    return (cast(x, torch.bfloat16),)


def _from_bfloat16(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return cast(parts[0], dtype)


def _to_float8(x: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    wide, is_finite, scale, quotient = _scaled(x, 416.0)
    infinity = torch.where(wide > 0, 448.0, torch.where(wide < 0, -448.0, math.nan))
    return cast(torch.where(is_finite, quotient, infinity), torch.float8_e4m3fn), scale


def _from_float8(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    code = cast(parts[0], torch.float32)
    return cast(torch.where(code.abs() > 416.0, code * math.inf, code * parts[1]), dtype)


def _to_int8(x: Tensor, u: Tensor | None) -> tuple[Tensor, ...]:
    assert u is not None
    # Not 126: quotient + u must stay below 127, the code of an infinity, after float32's rounding.
    return _to_integers(x, u, torch.int8, 125.99)


def _to_int16(x: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    return _to_integers(x, 0.5, torch.int16, 32766.0)


def _to_integers(x: Tensor, rounding: Tensor | float, dtype: torch.dtype, largest: float) -> tuple[Tensor, ...]:
    wide, is_finite, scale, quotient = _scaled(x, largest)
    infinity = float(torch.iinfo(dtype).max)
    special = torch.where(wide > 0, infinity, torch.where(wide < 0, -infinity, -infinity - 1.0))
    return cast(torch.where(is_finite, torch.floor(quotient + rounding), special), dtype), scale


def _from_integers(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    code, infinity = cast(parts[0], torch.float32), float(torch.iinfo(parts[0].dtype).max)
    special = torch.where(code < -infinity, math.nan, code * math.inf)
    return cast(torch.where(code.abs() >= infinity, special, code * parts[1]), dtype)


def _scaled(x: Tensor, largest: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x in float32, a mask of its finite elements, the scales of its rows, and x / scale, at most `largest`."""
    wide = cast(x, torch.float32)
    size = wide.abs()
    is_finite = size < math.inf
    scale = torch.where(is_finite, size, 0.0).amax(-1, keepdim=True) / largest
    # A scale below the normal numbers has few bits, and quotients would be too large: such a row becomes zeros.
    return wide, is_finite, scale, wide / torch.where(scale > torch.finfo(torch.float32).tiny, scale, 1.0)


def uniform_numbers(x: Tensor, seed: Tensor, number: int) -> Tensor:
    """Return a float32 tensor of x's shape, uniform in (0, 1), for the value with this number in its graph.

    See [one number for a row and one for a column].
    """
    columns = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    bits = keep_factors(seed, (rows + columns, _BITS), None, _BITS * number, p=0.5)
    drawn, half = cast(bits, torch.float32), _BITS // 2
    while half:
        drawn, half = drawn[:, :half] + 2.0**half * drawn[:, half:], half // 2
    uniform = (drawn[:, 0] + 0.25) / 2.0**_BITS
    total = uniform[:rows].view(*x.shape[:-1], 1) + uniform[rows:]
    return total - torch.floor(total)


COMPRESSIONS: Final = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Compression("bfloat16", 2, False, _to_bfloat16, _from_bfloat16),
            Compression("float8", 1, True, _to_float8, _from_float8),
            Compression("int8", 1, True, _to_int8, _from_integers, draws=True),
        )
    }
)

_INT16: Final = Compression("int16", 2, True, _to_int16, _from_integers)


def compression(name: str | None) -> Compression | None:
    """Return the compression of that name; None for None.

    Raises:
        ValueError: there is no such compression; the message lists them.
    """
    if name is None:
        return None
    if name not in COMPRESSIONS:
        raise ValueError(no_such("compression", name, COMPRESSIONS))
    return COMPRESSIONS[name]


def held_by_caller(
    inputs: Sequence[fx.Node], gradients: Iterable[Any], outputs: Iterable[Any], *, static: Collection[str]
) -> set[fx.Node]:
    """Return the storages that stay in memory whether they are saved or not, see [what stays exact].

    Args:
        inputs: forward's inputs.
        gradients: for each input its gradient, or None.
        outputs: forward's outputs.
        static: the names of the inputs that outlive the call.
    """
    own = {node for node, gradient in zip(inputs, gradients, strict=False) if gradient is not None}
    held = {node for node in inputs if node not in own or node.name in static}
    return held | {storage_of(node) for node in outputs if isinstance(node, fx.Node)}


def with_compression(joint: JointGraph, name: str) -> JointGraph:
    """Return the joint graph with the values that a compression compresses if they are saved."""
    wanted = compression(name)
    assert wanted is not None
    outputs: Any = joint.module.graph.output_node().args[0]
    number = joint.num_forward_outputs
    inputs = [node for node in joint.nodes if node in joint.inputs]
    static = {node.name for node in joint.static_inputs}
    held = held_by_caller(inputs, outputs[number:], outputs[:number], static=static)
    read = {*joint.needed, *joint.from_gradients}
    sensitive = sensitive_in([node for node in joint.nodes if node in read])
    compressed: dict[fx.Node, int] = {}
    why_exact: dict[fx.Node, str] = {}
    for node in joint.needed:
        chosen = compression_for(node, wanted, held=held, sensitive=sensitive)
        if isinstance(chosen, str):
            why_exact[node] = chosen
        else:
            compressed[node] = chosen.bytes_of(node)
    return replace(joint, compress=name, compressed=compressed, why_exact=why_exact)


def compression_for(
    node: fx.Node, wanted: Compression, *, held: Collection[fx.Node], sensitive: Sensitive, name: str = ""
) -> Compression | str:
    """Return the compression of a value if `wanted` is asked for, or why the value stays exact.

    See [what stays exact], and [factors of exponents] in `sensitive_values`.

    Args:
        node: the value.
        wanted: the compression that the caller asked for.
        held: the storages of `held_by_caller`.
        sensitive: the sensitive values of the graph that reads the value.
        name: the value's name in that graph, if it differs.
    """
    name = name or node.name
    wanted = _INT16 if name in sensitive.factors else wanted
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return "it holds no floats"
    if value.dtype.itemsize <= wanted.itemsize:
        return f"it has {8 * value.dtype.itemsize} bits already"
    if storage_of(node) in held:
        return "the caller holds it"
    if num_elements(node) < _FEWEST_ELEMENTS or (wanted.has_scales and size_hint(value.shape[-1]) < _SHORTEST_ROW):
        return "it is small"
    if name in sensitive.exact:
        return sensitive.exact[name]
    if _is_statistic(node):
        return "it is a statistic"
    # torch keeps such a value out of `save_for_backward`, by its place among the outputs.
    return "its memory may change" if node.meta.get("saved_tensor_with_no_vc_check") else wanted


def _is_statistic(node: fx.Node) -> bool:
    """True for the result of a reduction, also after elementwise ops, and for each result of an op but its first."""
    seen = {node}
    stack = [node]
    while stack:
        step = stack.pop()
        is_element = step.target is operator.getitem and not looks_at_its_input(step)
        source = step.all_input_nodes[0] if is_element else step
        if overload_packet(source) in _REDUCES or (is_element and step.args[1] != 0):
            return True
        if is_fusible(step) or looks_at_its_input(step):
            elements = num_elements(step)
            same = {
                source for source in step.all_input_nodes if is_float(source) and num_elements(source) == elements
            } - seen
            seen |= same
            stack += same
    return False


def compress_saved_pass(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    name: str | None,
    *,
    num_forward_outputs: int,
    static_inputs: Collection[str],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Let forward return its saved values compressed, and let backward restore them before their first readers.

    Args:
        forward, backward: the results of any partitioner; backward takes the saved sizes, then the saved tensors, in
            their order.
        name: the compression; None compresses nothing.
        num_forward_outputs: how many outputs of forward are not for backward.
        static_inputs: the names of the inputs that outlive the call.
    """
    wanted = compression(name)
    if wanted is None:
        return forward, backward
    output, gradients = forward.graph.output_node(), backward.graph.output_node()
    returned: Any = output.args[0]
    outputs, saved = returned[:num_forward_outputs], returned[num_forward_outputs:]
    inputs, ends = forward.graph.find_nodes(op="placeholder"), backward.graph.find_nodes(op="placeholder")
    of_inputs: Any = gradients.args[0]
    held = held_by_caller(inputs, of_inputs, outputs, static=static_inputs)
    sensitive = sensitive_in(list(backward.graph.nodes))
    position = {node: index for index, node in enumerate(backward.graph.nodes)}
    start = next(node for node in forward.graph.nodes if node.op != "placeholder")
    seeds: dict[torch.device, fx.Node] = {}
    parts_of: dict[fx.Node, list[fx.Node]] = {}
    tensors = [node for node in saved if not (isinstance(node, fx.Node) and is_sym_node(node))]
    for node, end in zip(tensors, ends[len(saved) - len(tensors) :], strict=False):
        if not isinstance(node, fx.Node):
            continue
        # A user's partitioner may give the value another name in backward.
        chosen = compression_for(node, wanted, held=held, sensitive=sensitive, name=end.name)
        if isinstance(chosen, str):
            continue
        device = node.meta["val"].device
        if chosen.draws and device not in seeds:
            seeds[device] = _rounding_seed(forward.graph, inputs[-1], node)
            start = start if len(seeds) > 1 else seeds[device].next
        with forward.graph.inserting_before(start if node.op == "placeholder" else node.next):
            compress = _compressing(chosen, number=len(parts_of))
            arguments = [node, seeds[device]] if chosen.draws else [node]
            parts = inlined(forward.graph, compress, arguments, f"{node.name}_{chosen.name}")
        with backward.graph.inserting_before(end):
            parts_there = [backward.graph.placeholder(part.name) for part in parts]
        for part, there in zip(parts, parts_there, strict=True):
            part.meta[COMPRESSED_FROM] = node, chosen
            there.meta["val"] = part.meta["val"]
        with backward.graph.inserting_before(min(end.users, key=position.__getitem__, default=gradients)):
            restore = _restoring(chosen, node.meta["val"].dtype)
            (restored,) = inlined(backward.graph, restore, parts_there, f"{end.name}_restored")
        end.replace_all_uses_with(restored)
        backward.graph.erase_node(end)
        parts_of[node] = parts
    output.args = ((*outputs, *(part for node in saved for part in parts_of.get(node, [node]))),)
    described = output.meta.get("desc")
    if described is not None:  # a description of each output
        of_saved = zip(saved, described[num_forward_outputs:], strict=True)
        of_parts = [what for node, what in of_saved for _ in parts_of.get(node, [node])]
        output.meta["desc"] = [*described[:num_forward_outputs], *of_parts]
    return recompiled(forward), recompiled(backward)


def is_rounding_seed(node: fx.Node) -> bool:
    """True for the op that draws the seed for stochastic rounding."""
    return node.target is SEED_OP and node.name.startswith(_SEED)


def _rounding_seed(graph: fx.Graph, last_input: fx.Node, value: fx.Node) -> fx.Node:
    """Add a seed on the device of `value` right behind the inputs.

    If the first random op draws a seed on this device, that op moves to the front, and the new seed is computed from
    its seed. Else the new seed is drawn.
    """
    drawn = next((node for node in graph.nodes if draws(node) and not _is_operand_of_seed(node)), None)
    is_seed = drawn is not None and drawn.target is SEED_OP
    if drawn is None or not is_seed or drawn.meta["val"].device != value.meta["val"].device:
        with graph.inserting_before(last_input.next):
            (seed,) = inlined(graph, _draw_like, [value], _SEED)
            return seed
    for node in (drawn, *drawn.all_input_nodes):  # its operand depends on nothing
        last_input.append(node)
    with graph.inserting_before(drawn.next):
        (seed,) = inlined(graph, lambda seed: (seed ^ _OTHER_KEY,), [drawn], _SEED)
    return seed


def _is_operand_of_seed(node: fx.Node) -> bool:
    return any(user.target is SEED_OP for user in node.users)


def _draw_like(x: Tensor) -> tuple[Tensor]:
    fresh = torch.empty((), dtype=torch.int64, device=x.device)  # as in `seeded_dropout_pass`
    return (SEED_OP(fresh, device=x.device),)


def _compressing(chosen: Compression, number: int) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, *seed: chosen.compress(x, uniform_numbers(x, seed[0], number) if seed else None)


def _restoring(chosen: Compression, dtype: torch.dtype) -> Callable[..., tuple[Tensor]]:
    return lambda *parts: (chosen.restore(parts, dtype),)
