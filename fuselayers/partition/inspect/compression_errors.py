"""compression_errors -- the errors that compression makes in saved values and gradients, measured on real inputs."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor, nn

from ..._torch.dispatch import forked_rng, tree_leaves, tree_map_only
from ..choose.partitioners import Partitioner, default
from ..fused_function import FusedFunction
from ..fused_module import FusedModule, eager_view
from ..passes import COMPRESSED_FROM, Compression, is_rounding_seed
from .capture import traced_op_by_op
from .saved_bytes import tensors_of

_ROUNDING: Final = 1e-5  # of the largest gradient's norm


def compression_errors(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    backend: str,
    cut: Partitioner,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Run forward and backward twice, op by op, exact and with the compression of `cut`, from the same random state.

    The gradients are those of the sum of the results, each weighted with normal numbers unless it is a scalar. The
    function, its arguments and the random state do not change.

    Return relative errors, |compressed - exact| / |exact| in Euclidean norms: for each graph those of its compressed
    values by the names of their nodes; and those of gradients by name, of a module's parameters or of a function's
    arguments, not of modules that it closes over. Gradients that are zero but for rounding are left out, such as that
    of a key's bias.
    """
    errors: list[dict[str, float]] = []
    with forked_rng():
        right = _gradients(fn, args, kwargs, _recorder(default, []), backend)
        rounded = _gradients(fn, args, kwargs, _recorder(cut, errors), backend)
    norms = {name: float(gradient.double().norm()) for name, gradient in right.items()}
    zero = _ROUNDING * max(norms.values(), default=0.0)
    gradients = {name: _relative_error(rounded[name], right[name]) for name, norm in norms.items() if norm > zero}
    return errors, gradients


def _relative_error(rounded: Tensor, exact: Tensor) -> float:
    difference = (rounded.double() - exact.double()).norm()
    return float(difference / exact.double().norm()) if difference else 0.0


def _gradients(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], cut: Partitioner, backend: str
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    fn = fn.fn if isinstance(fn, FusedFunction) else fn
    fn = eager_view(fn) if isinstance(fn, FusedModule) else fn
    fn = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
    args, kwargs = tree_map_only(Tensor, _as_leaf, (tuple(args), kwargs))
    named = fn.named_parameters() if isinstance(fn, nn.Module) else _named(args, kwargs)
    inputs = {name: tensor for name, tensor in named if tensor.requires_grad}
    # A function may write to its arguments, but autograd forbids a write to a leaf.
    args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    with traced_op_by_op(cut, backend=backend) as traced:
        returned = tensors_of(traced(lambda: fn(*args, **kwargs))())
        results = [result for result in returned if result.requires_grad]
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.randn(result.shape, generator=generator).to(result) if result.dim() else torch.ones_like(result)
            for result in results
        ]
        gradients = torch.autograd.grad(results, list(inputs.values()), weights, allow_unused=True) if inputs else ()
    return {name: gradient for name, gradient in zip(inputs, gradients, strict=True) if gradient is not None}


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _named(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors of a function's arguments, by their numbers."""
    leaves = enumerate(tree_leaves((args, kwargs)))
    return [(f"argument {number}", leaf) for number, leaf in leaves if isinstance(leaf, Tensor)]


def _recorder(cut: Partitioner, errors_of: list[dict[str, float]]) -> Partitioner:
    """Return a partitioner whose forward records the error of each value that it compresses, by graph."""

    def recorded(
        joint_module: fx.GraphModule, joint_inputs: Any, /, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = cut(joint_module, joint_inputs, **options)
        output: Any = forward.graph.output_node()
        errors: dict[str, float] = {}
        errors_of.append(errors)
        parts: dict[tuple[fx.Node, Compression], list[fx.Node]] = {}
        for part in output.args[0]:
            if isinstance(part, fx.Node) and COMPRESSED_FROM in part.meta:
                parts.setdefault(part.meta[COMPRESSED_FROM], []).append(part)
        for node in forward.graph.nodes:
            if is_rounding_seed(node):  # a draw would change the masks that follow
                fixed = {"dtype": torch.int64, "device": node.kwargs["device"]}
                node.target, node.args, node.kwargs = torch.ops.aten.full.default, ([], 0), fixed
        for (exact, way), compressed in parts.items():
            with forward.graph.inserting_before(output):
                first = forward.graph.call_function(_recording(errors, exact.name, way), (exact, *compressed))
            first.meta["val"] = compressed[0].meta["val"]
            output.replace_input_with(compressed[0], first)
        forward.recompile()
        return forward, backward

    return recorded


def _recording(errors: dict[str, float], name: str, way: Compression) -> Callable[..., Tensor]:
    def record(exact: Tensor, *parts: Tensor) -> Tensor:
        errors[name] = _relative_error(way.restore(parts, exact.dtype), exact)
        return parts[0]

    return record
