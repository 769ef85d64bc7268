"""The part of an example's program that runs it and compares: `Example.program` copies these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def run(
    wrap: Callable[[Any], Any],
    make: Callable[[], Any],
    inputs: Callable[..., Sequence[Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = (2,),
    incoming: str = "dense",
    grad: bool = True,
    seed: int = 0,
    wide: bool = False,
) -> dict[str, Tensor]:
    """Call `wrap(make())` once per size; return values, inputs after the call, gradients, buffers, and what is shared.

    With `wide` the values of `dtype` are computed in float64.
    """
    torch.manual_seed(seed)
    model = make()
    parameters, buffers = {}, {}
    if isinstance(model, nn.Module):
        model = model.to(dtype).to(torch.float64 if wide else dtype)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    call, results = wrap(model), {}
    for number, size in enumerate(sizes):
        leaves = dict(parameters)

        def rand(*shape: int, grad: bool = grad, leaves: dict[str, Any] = leaves) -> Tensor:
            value = torch.randn(shape).to(dtype)
            value = value.double() if wide else value
            if not grad:
                return value
            leaf = leaves[f"input {len(leaves) - len(parameters)}"] = value.requires_grad_()
            return leaf * 1  # may be written to

        arguments = inputs(rand, size)
        with torch.set_grad_enabled(grad):
            outputs = call(*arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        named = {f"y{place}": out for place, out in enumerate(outputs)}
        named |= {f"x{place}": argument for place, argument in enumerate(arguments)}
        results |= {f"{number} {name}": value.detach().clone() for name, value in named.items()}
        for first, second in ((a, b) for a in named for b in named if a < b):
            addresses = [named[name].untyped_storage().data_ptr() for name in (first, second)]
            results[f"{number} {first} shares memory with {second}"] = torch.tensor(addresses[0] == addresses[1])
        roots = [value for value in named.values() if value.requires_grad]
        if not roots or not leaves:
            continue
        torch.manual_seed(seed + 1)
        arriving = []
        for root in roots:
            value = (torch.ones(()) if incoming == "sum" else torch.randn(root.shape[::-1])).to(root)
            value = value.expand(root.shape) if incoming == "sum" else value.permute([*range(root.dim())][::-1])
            value = value if incoming in ("sum", "transposed") else value.contiguous()
            arriving.append(torch._neg_view(value) if incoming == "negative" else value)
        found = torch.autograd.grad(roots, [*leaves.values()], arriving, allow_unused=True, materialize_grads=True)
        results |= {f"{number} gradient of {name}": value for name, value in zip(leaves, found, strict=True)}
    return results | {f"buffer {name}": value.clone() for name, value in buffers.items()}


def difference(
    got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], *, bits_lost: float = 0.0
) -> str:
    """Return what is wrong with `got`, which may err 20 times as much as `plain`, both against `exact` in float64.

    With compressed saves a gradient may also err by `bits_lost` times the largest element of all results.
    """
    sizes = [value.double().abs().max().item() for value in exact.values() if value.numel()]
    for name, value in got.items():
        wanted, own = exact[name].double(), plain[name]
        if (value.dtype, value.shape) != (own.dtype, own.shape):
            return f"{name} is {value.dtype} {[*value.shape]}, wanted {own.dtype} {[*own.shape]}"
        if value.numel() == 0:
            continue
        error, size = (value.double() - wanted).abs().max().item(), wanted.abs().max().item()
        unit = torch.finfo(own.dtype).eps if own.is_floating_point() else 0.0
        allowed = 20 * (own.double() - wanted).abs().max().item() + unit * (16 * size + max(sizes))
        allowed += bits_lost * max(sizes) if "gradient" in name else 0.0
        if not error <= allowed:
            return f"{name}: error {error:.3g}, allowed {allowed:.3g}, largest element {size:.3g}"
    return ""
