"""inductor_faults -- contexts that keep Inductor from its silent faults. Checked with torch 2.13.0 and 2.14.1.

docs/reliability.md has a short program for each.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.fx as fx


@contextlib.contextmanager
def without_faults() -> Iterator[None]:
    """Compile in this context. Dynamo compiles under a lock, so no other thread is affected."""
    with _attention_up_to_four_dimensions(), _signed_gradients(), _average_pools_with_whole_windows():
        yield


def _attention_up_to_four_dimensions() -> AbstractContextManager[Any]:
    """Return a context in which Inductor does not replace an attention of more than four dimensions.

    Its patterns are for four, but some also match five. Their replacements then transpose the wrong dimensions: the
    results are wrong, or nothing compiles.
    """
    from torch._inductor import pattern_matcher

    is_match = pattern_matcher.is_match

    def is_match_that_fits(match: Any) -> Any:
        if not is_match(match):
            return False
        query = match.kwargs.get("query")
        return not isinstance(query, fx.Node) or query.meta["val"].dim() <= 4

    return mock.patch.object(pattern_matcher, "is_match", is_match_that_fits)


def _average_pools_with_whole_windows() -> AbstractContextManager[Any]:
    """Return a context in which torch's own kernel computes the gradient of an average pool with `ceil_mode`.

    In Inductor's code an element that lies only in a smaller window at the end gets no gradient, or a wrong one.
    """
    from torch._inductor import lowering

    replaced: dict[Any, Callable[..., Any]] = {}
    for dimensions in (2, 3):
        op = getattr(torch.ops.aten, f"avg_pool{dimensions}d_backward").default
        own, kernel = lowering.lowerings[op], getattr(lowering, f"fallback_avg_pool{dimensions}d_backward")

        def lowered(*arguments: Any, own: Any = own, kernel: Any = kernel) -> Any:
            ceil_mode = arguments[5]
            return (kernel if ceil_mode else own)(*arguments)

        replaced[op] = lowered
    return mock.patch.dict(lowering.lowerings, replaced)


def _signed_gradients() -> AbstractContextManager[Any]:
    """Return a context in which a compiled backward reads the gradients' negative bit.

    Inductor's code reads the memory alone. The hook runs for a backward from AOTAutograd's cache too.
    """
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    post_compile = AOTDispatchAutograd.post_compile

    def post_compile_signed(spec: Any, *rest: Any, **options: Any) -> Any:
        if getattr(spec, "compiled_bw_func", None) is not None:
            spec = dataclasses.replace(spec, compiled_bw_func=_signed(spec.compiled_bw_func))
        return post_compile(spec, *rest, **options)

    return mock.patch.object(AOTDispatchAutograd, "post_compile", post_compile_signed)


def _signed(backward: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run(inputs: list[Any]) -> Any:
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.is_neg():
                inputs[index] = value.resolve_neg()
        return backward(inputs)

    assert getattr(backward, "_boxed_call", False)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
