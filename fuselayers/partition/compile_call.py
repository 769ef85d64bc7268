"""compile_call -- a function through Inductor for calls like one, without Dynamo in front and autograd behind.

Used by the ops, whose calls are so short that the guards of `torch.compile` cost as much as they do.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.fx as fx

from .._torch.dispatch import FakeTensorMode, as_a_compiler, disable_current_modes, pytree
from .._torch.tracing import functorch_config, inductor_compilers, make_fx, named_source, symbolic_shapes


class CompiledCall(NamedTuple):
    """A compiled function: `run` takes the tensors as a list and empties it, `takes` is its guard."""

    takes: Callable[[Sequence[torch.Tensor]], bool]
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def compile_call(
    fn: Callable[..., tuple[torch.Tensor, ...]], tensors: Sequence[torch.Tensor], any_size: Sequence[Collection[int]]
) -> CompiledCall:
    """Compile a function for calls like this one, without Dynamo in front and without autograd behind.

    Dynamo's guards and AOTAutograd's wrappers cost as much as a short call: on two cores of an AMD EPYC, a call of
    2x1024 elements takes 11 us through `torch.compile`, and 2 us here.

    Args:
        fn: a function of contiguous tensors; it writes to none of them, and returns new ones. When it runs, autograd
            must not record: no tensor needs a gradient, or the call is below autograd.
        tensors: example inputs, at least one.
        any_size: for each of them, the dimensions that may have other sizes; not those of size 0 and 1.

    Raises:
        ValueError: the function returns one of its arguments, or a view of it, or two views of one tensor.
    """
    compile_fx, compile_fx_inner = inductor_compilers()
    made: list[Any] = []

    def innermost(graph_module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        made.append(compile_fx_inner(graph_module, inputs, **options))
        return made[-1]

    shapes = symbolic_shapes().ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, static_shapes=False)
    with (
        as_a_compiler(),
        disable_current_modes(),
        torch.no_grad(),
        torch.autocast(tensors[0].device.type, enabled=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        examples, fixed = [], []
        for number, (tensor, dimensions) in enumerate(zip(tensors, any_size, strict=True)):
            free = {index for index in dimensions if tensor.shape[index] > 1}
            fixed += [(number, index, size) for index, size in enumerate(tensor.shape) if index not in free]
            kinds = symbolic_shapes().DimDynamic
            context: Any = symbolic_shapes().StatelessSymbolicContext(
                dynamic_sizes=[kinds.DYNAMIC if index in free else kinds.STATIC for index in range(tensor.dim())],
                constraint_sizes=[None] * tensor.dim(),
            )
            blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            source = named_source(f"argument_{number}")
            examples.append(mode.from_tensor(blank, symbolic_context=context, source=source))
        with mode:
            graph_module = make_fx(fn)(*examples)
        returned = [node.meta["val"] for node in pytree.tree_leaves(graph_module.graph.output_node().args)]
        storages = [one.untyped_storage()._cdata for one in (*examples, *returned)]
        if len(set(storages)) < len(storages):
            raise ValueError("a result shares memory with an argument or another result; return new tensors")
        compile_fx(graph_module, examples, inner_compile=cast(Any, innermost))
    (code,) = made
    guards = shapes.produce_guards_expression(examples)

    def takes(given: Sequence[torch.Tensor]) -> bool:
        return all(given[number].shape[index] == size for number, index, size in fixed) and (
            not guards or shapes.evaluate_guards_expression(guards, given)
        )

    return CompiledCall(takes, getattr(code, "current_callable", None) or code)
