"""Compare two modules that should compute the same. Used by the tests of layers, of build and of rebuild."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[..., Tensor | tuple[Tensor, ...]]


def run(module: Run, inputs: Sequence[Tensor], *, call: Run | None = None, seed: int = 3) -> dict[str, Tensor]:
    """Return the outputs and all gradients of a step, by name. Each input becomes a leaf.

    `call` runs in place of the module, and uses its parameters.
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    parameters = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    for parameter in parameters.values():
        parameter.grad = None
    torch.manual_seed(seed)
    outputs = (module if call is None else call)(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # The weights differ at every place: a plain sum would hide a gradient at the wrong place.
    weights = [torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y) for y in outputs]
    sum(((y * weight).sum() for y, weight in zip(outputs, weights, strict=True)), torch.zeros(())).backward()
    named: dict[str, Any] = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    named |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.requires_grad}
    named |= {f"gradient of {name}": parameter.grad for name, parameter in parameters.items()}
    missing = [name for name, value in named.items() if value is None]
    assert not missing, f"no {missing}"
    return named


def assert_same_step(first: Run, second: Run, *inputs: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Fail unless both modules give the same outputs and gradients from the same seed.

    If the first is no module, it computes with the parameters of the second.
    """
    owner = first if isinstance(first, nn.Module) else second
    assert_same_values(run(owner, inputs, call=first), run(second, inputs), rtol=rtol, atol=atol)


def assert_same_values(
    expected: dict[str, Tensor], got: dict[str, Tensor], *, rtol: float = 1e-4, atol: float = 2e-6
) -> None:
    """Fail unless two runs have the same outputs and gradients, by default to the rounding of float32."""
    assert list(expected) == list(got)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def randomise(module: nn.Module) -> nn.Module:
    """Give every parameter random values, so that no initial 0 or 1 hides a term of a formula."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(mean=0.3, std=0.5)
    return module
