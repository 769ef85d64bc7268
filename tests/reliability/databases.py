"""Helpers of the tests over PyTorch's databases of ops and modules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def detached(tree: Any) -> Any:
    """A copy whose tensors are new leaves. They require gradients where the tensors of `tree` do."""

    def copy(value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)

    return pytree.tree_map_only(Tensor, copy, tree)


def results(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, parameters: Sequence[Tensor] = ()
) -> Any:
    """The outputs of `fn`, its inputs and the generator's state after the call, and the gradients of inputs and
    `parameters`.

    The inputs are copied first, since some ops write into them. The random numbers are the same every time.
    """
    args, kwargs = detached((tuple(args), dict(kwargs)))
    leaves = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad] + [*parameters]
    torch.manual_seed(0)
    out = fn(*args, **kwargs)
    random_state = torch.get_rng_state()
    reached = [tensor for tensor in _tensors(out) if tensor.requires_grad]
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for tensor in reached]
    gradients = torch.autograd.grad(reached, leaves, incoming, allow_unused=True) if reached and leaves else ()
    return pytree.tree_map_only(Tensor, Tensor.detach, (out, _tensors((args, kwargs)))), random_state, gradients


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
