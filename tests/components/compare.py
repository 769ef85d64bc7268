"""Comparing two modules that should mean the same. Used by the tests of every layer with a plain and a fused form."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[..., Tensor | tuple[Tensor, ...]]


def run(module: Run, inputs: Sequence[Tensor], *, seed: int = 3) -> dict[str, Tensor]:
    """Return the outputs and every gradient of one step, by name, each input taken as a leaf."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    parameters = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    for parameter in parameters.values():
        parameter.grad = None
    torch.manual_seed(seed)
    outputs = module(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Weights that differ from place to place: a plain sum would hide a gradient that went to the wrong place.
    weights = [torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y) for y in outputs]
    sum(((y * weight).sum() for y, weight in zip(outputs, weights, strict=True)), torch.zeros(())).backward()
    named: dict[str, Any] = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    named |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.requires_grad}
    named |= {f"gradient of {name}": parameter.grad for name, parameter in parameters.items()}
    missing = [name for name, value in named.items() if value is None]
    assert not missing, f"no {missing}"
    return named


def assert_same_step(first: Run, second: Run, *inputs: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Fail unless both modules give the same outputs and gradients from the same seed."""
    assert_same_values(run(first, inputs), run(second, inputs), rtol=rtol, atol=atol)


def assert_same_values(expected: dict[str, Tensor], got: dict[str, Tensor], *, rtol: float, atol: float) -> None:
    """Fail unless two runs have the same outputs and gradients."""
    assert list(expected) == list(got)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def randomise(module: nn.Module) -> nn.Module:
    """Give every parameter values that no initialisation gives, so that no term of a formula is hidden by a 0 or 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(mean=0.3, std=0.5)
    return module
