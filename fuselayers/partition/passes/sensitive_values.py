"""sensitive_values -- the values of a graph for which 8 bits, or bfloat16, are too few in backward.

Note: [factors of exponents] The backward of a fused attention recomputes its scores, and takes the exponential of
score - log-sum-exp. The backward of a fused linear loss does so with its logits. Errors in the factors of these
products do not average out: on average the exponential of a rounded score is too large. So queries, keys, and the input
of such a loss are saved in int16, with an error of at most 1 / 65,532 of a row's largest value. In bfloat16 a score of
1,000 would have an error of 4, and the gradient of the weights one of 150 %; in int16 it has 1 %. If a checkpoint
recomputes attention or the loss op by op, their factors are not found. The arguments of sines are saved in int16 too.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from ..._torch.tracing import overload_packet
from ..node_kinds import arguments_of, behind_gradients, is_fusible, looks_at_its_input

# Ops that compare or round a value of forward and return floats. Other comparisons are found by their dtype, see
# `_is_made_of_floats`.
_COMPARES: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("threshold_backward", "hardtanh_backward", "hardsigmoid_backward", "hardswish_backward"),
        *("hardshrink_backward", "softshrink_backward", "leaky_relu_backward", "elu_backward"),
        *("sgn", "sign", "floor", "ceil", "round", "trunc", "_prelu_kernel_backward"),
    )
)
# Ops that may come between a logarithm and its exponential, as a product with a number may. silu takes exp(-x), so a
# negation does not count.
_SHIFTS: Final = frozenset(
    {torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.where, torch.ops.prims.convert_element_type}
)
_SCALES: Final = frozenset({torch.ops.aten.mul, torch.ops.aten.div})
_EXPONENTIALS: Final = frozenset(
    getattr(torch.ops.aten, name) for name in ("exp", "exp2", "expm1", "_softmax", "logsumexp", "softplus")
)
# An error of their argument is in radians, whatever the argument's size.
_PERIODIC: Final = frozenset({torch.ops.aten.sin, torch.ops.aten.cos, torch.ops.aten.tan})
# The arguments of backward ops that are exponents, and those that are factors of exponents.
_EXPONENTS: Final = MappingProxyType(
    {"_log_softmax_backward_data": ("output",), "cross_entropy_backward": ("logits",), "softplus_backward": ("self",)}
)
_FACTORS: Final = MappingProxyType(
    {"linear_cross_entropy_backward": ("x", "weight"), "linear_log_prob_backward": ("x", "weight")}
)
_FACTORS_OF_ATTENTION: Final = ("query", "key", "q", "k")
# Other ops between the saved value and a query or key, as in rotary positions.
_JOINS: Final = frozenset({torch.ops.aten.cat, torch.ops.aten.stack})


class Sensitive(NamedTuple):
    """The float values that `compress_saved` treats otherwise, by the names of their nodes.

    Attributes:
        exact: the values that must be exact, and why.
        factors: the values that need int16, see [factors of exponents].
    """

    exact: Mapping[str, str]
    factors: Collection[str]


def sensitive_in(nodes: Sequence[fx.Node]) -> Sensitive:
    """Return the sensitive values of a joint or a backward graph.

    Backward compares them or indexes with them, directly or after elementwise ops; or it takes the exponential of them
    or of their products.
    """
    gradients = behind_gradients(nodes)
    compared: set[fx.Node] = set()
    exponents: set[fx.Node] = set()
    factors: set[fx.Node] = set()
    for node in reversed(nodes):
        op, is_gradient = overload_packet(node), node in gradients
        looks = looks_at_its_input(node)
        chained = node in compared and (is_fusible(node) or looks)
        if op in _COMPARES or (not is_gradient and (chained or _is_made_of_floats(node))):
            compared.update(node.all_input_nodes)
        is_shift = op in _SHIFTS or (op in _SCALES and not isinstance(node.args[1], fx.Node)) or looks
        if (is_shift and node in exponents) or (op in _EXPONENTIALS and not is_gradient):
            exponents.update(node.all_input_nodes)
        if (node in factors and (is_fusible(node) or looks or op in _JOINS)) or (op in _PERIODIC and not is_gradient):
            factors.update(node.all_input_nodes)
        exponents.update(_arguments(node, _EXPONENTS.get(_name_of(node), ())))
        names = _FACTORS_OF_ATTENTION if _is_backward_of_attention(node) else _FACTORS.get(_name_of(node), ())
        factors.update(_arguments(node, names))
    return Sensitive(
        {
            **{node.name: "backward takes its exponential" for node in exponents},
            **{node.name: "backward compares it" for node in compared},
        },
        {node.name for node in factors},
    )


def _name_of(node: fx.Node) -> str:
    return str(getattr(overload_packet(node), "__name__", ""))


def _is_backward_of_attention(node: fx.Node) -> bool:
    return "attention" in _name_of(node) and _name_of(node).endswith("_backward")


def _arguments(node: fx.Node, names: Collection[str]) -> list[fx.Node]:
    """Return the nodes among an op's arguments of these names."""
    arguments = arguments_of(node) if names else {}
    return [value for name in names if isinstance(value := arguments.get(name), fx.Node)]


def _is_made_of_floats(node: fx.Node) -> bool:
    """True for bools and whole numbers computed from floats."""
    inputs = [source for source in node.all_input_nodes if is_float(source)]
    return bool(inputs) and isinstance(node.meta.get("val"), Tensor) and not is_float(node)


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
